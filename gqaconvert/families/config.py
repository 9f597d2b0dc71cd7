"""config.json, read with distrust: values by any of their names, at the level where the decoder's keys are."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gqaconvert.errors import CheckpointError

HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "decoder_key_value_heads")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
CONTEXT = ("max_position_embeddings", "n_positions")
VOCABULARY = ("vocab_size",)
HEAD_DIM = ("head_dim", "d_kv", "kv_channels")
LARGEST_SIZE = 2**31
"""Sensible bound of what is counted in tokens; heads and layers have a smaller one."""
_LARGEST = 2**17


def whole_number(name: str, value: object, smallest: int, largest: int) -> int:
    """A value of config.json that must be a whole number within bounds.

    Raises:
        CheckpointError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value <= largest:
        raise CheckpointError(f"config.json: {name} is {repr(value)[:80]}, not a sensible whole number")
    return value


@dataclass(frozen=True)
class ModelConfig:
    """A parsed config.json.

    Attributes:
        raw: the whole document.
        path: where the text decoder's keys are: () or ("text_config",).
    """

    raw: Mapping[str, Any]
    path: tuple[str, ...]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> "ModelConfig":
        """Find the decoder's level: transformers lets ``text_config`` win over keys at the top."""
        nested = raw.get("text_config")
        return cls(raw, ("text_config",) if isinstance(nested, dict) and nested else ())

    @property
    def text(self) -> Mapping[str, Any]:
        """The level that describes the decoder."""
        level: Any = self.raw
        for key in self.path:
            level = level[key]
        return level  # type: ignore[no-any-return]

    @property
    def model_type(self) -> str:
        """``model_type`` of the decoder, or of the whole where the nested level does not say."""
        found = self.text.get("model_type") or self.raw.get("model_type") or ""
        return found if isinstance(found, str) else ""

    def count(self, names: tuple[str, ...], largest: int = _LARGEST) -> int | None:
        """A positive whole number under the first of ``names`` that is set; absent and null are the same.

        Raises:
            CheckpointError: the value is no such number, or absurdly large.
        """
        for name in names:
            value = self.value(name)
            if value is None:
                continue
            return whole_number(name, value, 1, largest)
        return None

    def value(self, name: str) -> Any:  # noqa: ANN401
        """What stands under a key of the decoder's level; "a.b" is b within a."""
        found: Any = self.text
        for key in name.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    def matches(self, wanted: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
        """Whether all of ``wanted`` hold, absent keys counting as the config class's defaults."""
        return all(self.text.get(key, defaults.get(key)) == value for key, value in wanted.items())

    def with_values(self, changes: Mapping[str, Any], *, everywhere: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The document with ``changes`` made at the decoder's level, and ``everywhere`` wherever those keys exist."""
        document = copy.deepcopy(dict(self.raw))
        level = document
        for key in self.path:
            level = level[key]
        level.update(changes)
        # A flat copy of a nested key would contradict it.
        document.update({key: value for key, value in changes.items() if key in document})
        for candidate in (document, *(value for value in document.values() if isinstance(value, dict))):
            candidate.update({key: value for key, value in (everywhere or {}).items() if key in candidate})
        return document
