"""What a model family is: where attention tensors are, how heads lie in them, which KV-head counts can be written."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, Literal

from gqaconvert.families import config


class Part(Enum):
    """The role of a tensor (or of its weight and bias) inside one attention module."""

    QUERY = "query"
    QUERY_GATED = "query, each head followed by its gate"
    KEY = "key"
    VALUE = "value"
    OUTPUT = "output"
    QKV = "qkv"
    KEY_NORM = "key norm, its own for each KV head"
    KEY_NORM_LIST = "key norm, one tensor a KV head"
    KEY_NORM_SHARED = "key norm, one for all KV heads"
    UNTOUCHED = "untouched"


class Layout(Enum):
    """How query, key and value heads follow each other along the output axis of the projections."""

    SEPARATE = "separate"
    """q, k and v have a tensor each, heads in order."""
    BLOCKS = "fused, blocks"
    """One tensor: all query heads, all key heads, all value heads (Phi-3; gpt_bigcode and Falcon with one KV head)."""
    GROUPS = "fused, by KV head"
    """One tensor: per KV head its query heads, its key head, its value head (Falcon; per head q, k, v where H = G)."""


class Position(Enum):
    """How the attention knows positions; decides what a merge may do to K."""

    ROPE_HALF = "rope (half-split)"
    """Rotary pairs (i, i + rotary_dim/2), as in Llama."""
    ROPE_PAIRS = "rope (interleaved)"
    """Rotary pairs (2i, 2i + 1), as in GPT-J, GLM, Cohere."""
    ALIBI = "alibi"
    LEARNED = "learned"
    RELATIVE = "relative bias"
    NONE = "none"


class KvHeads(Enum):
    """Stands for the new number of KV heads in a `Form`'s config values."""

    COUNT = "KV_HEADS"


KV_HEADS: Final = KvHeads.COUNT


@dataclass(frozen=True)
class Default:
    """Stands, in a `Form`'s config values, for what the source's class assumes where config.json does not say."""

    value: object


Count = Literal["one", "some", "all"]
"""Which KV-head counts: 1, 1 < G < H, or G = H."""


def _frozen(items: Mapping[str, Any]) -> Mapping[str, Any]:
    return MappingProxyType(dict(items))


@dataclass(frozen=True)
class Form:
    """A shape in which certain KV-head counts can be written.

    Attributes:
        config: keys of config.json to set ("a.b" is b within a); `KV_HEADS` stands for the count, a `Default` is set
            only where absent.
        counts: the counts that this form can express.
        layout: of the output, None for the source's.
        requires: config values without which the form does not exist.
        shipped: the stock class has no such setting; the output brings a modelling file of ours that has
            (`families.shipped`), which needs the family's ``classes``.
        classes: the source's class -> the output's, where the form is of another model_type.
        linear: pattern of the tensors outside Q, K and V that this form stores (out, in), and the source (in, out).
        drops: pattern of buffers that this form's class does not know.
    """

    config: Mapping[str, Any] = field(default_factory=lambda: _frozen({"num_key_value_heads": KV_HEADS}))
    counts: frozenset[Count] = frozenset(("one", "some", "all"))
    layout: Layout | None = None
    requires: Mapping[str, Any] = field(default_factory=lambda: _frozen({}))
    shipped: bool = False
    classes: Mapping[str, str] = field(default_factory=lambda: _frozen({}))
    linear: str | None = None
    drops: str | None = None


SHIPPED = Form(counts=frozenset(("one", "some")), shipped=True)
"""Stock classes have no setting for it; ours takes the KV-head count under the usual name."""


@dataclass(frozen=True)
class Family:
    """One architecture, declared once.

    Attributes:
        name: of the family; several families may share a model_type and differ in ``when``.
        model_types: config.json's ``model_type`` values.
        stack: last component of the path of the decoder's layers ("layers" in ``model.layers.7.self_attn``).
        attention: path of the attention module inside a layer.
        cross_attention: path of a second one that reads an encoder's states, in the decoders that have it.
        parts: names inside the attention module -> their role. Names not listed here are refused.
        layout: of the projections.
        conv1d: names inside the attention module whose weights are stored (in, out).
        position: the position scheme.
        rotary_fraction: part of a head that is rotated, where the config does not say.
        attention_adds: the attention's output is added to the residual stream as it is; not where a norm or a
            multiplier stands between.
        forms: what can be written; empty if the stock class has no KV-head count.
        when: config values that select this family among those with the same model_type.
        defaults: what the stock config class assumes for the keys of ``when`` and of the forms' ``requires``.
        heads: config keys of the number of query heads, the first that is set counts.
        assumed_heads: query heads that the config class assumes where no key says, as in LLaVA's config.json.
        layers: config keys of the number of decoder layers.
        classes: auto class -> stock class, of those that a modelling file of ours can stand for.
        remote: the classes are no part of transformers: the layout is the published one, tested against no class.
        wasteful: why fewer KV heads can only be written expanded, None where a form saves.
        refusal: why nothing can be converted, for families that are known and refused.
        caution: a truth about this family that its user should hear.
    """

    name: str
    model_types: tuple[str, ...]
    parts: Mapping[str, Part]
    stack: str = "layers"
    attention: str = "self_attn"
    cross_attention: str | None = None
    layout: Layout = Layout.SEPARATE
    conv1d: frozenset[str] = frozenset()
    position: Position = Position.ROPE_HALF
    rotary_fraction: float = 1.0
    attention_adds: bool = True
    forms: tuple[Form, ...] = (Form(),)
    when: Mapping[str, Any] = field(default_factory=lambda: _frozen({}))
    defaults: Mapping[str, Any] = field(default_factory=lambda: _frozen({}))
    heads: tuple[str, ...] = config.HEADS
    assumed_heads: int | None = None
    layers: tuple[str, ...] = config.LAYERS
    classes: Mapping[str, str] = field(default_factory=lambda: _frozen({}))
    remote: bool = False
    wasteful: str | None = None
    refusal: str | None = None
    caution: str | None = None

    @property
    def attentions(self) -> tuple[str, ...]:
        """Paths of all attention modules inside a layer."""
        return (self.attention,) if self.cross_attention is None else (self.attention, self.cross_attention)

    def caution_for(self, config: Mapping[str, Any]) -> str | None:
        """The caution; one that begins with a config key ("key: ...") only where that key is set."""
        key = (self.caution or "").partition(":")[0]
        return None if key.isidentifier() and not config.get(key) else self.caution

    def rotary_part(self, model: config.ModelConfig, head_dim: int) -> float | None:
        """Part of each head that is rotated, None without rotary embedding."""
        text = model.text
        if self.position not in (Position.ROPE_HALF, Position.ROPE_PAIRS) or text.get("alibi"):
            return None
        rotary_dim = text.get("rotary_dim")
        if isinstance(rotary_dim, int) and 0 < rotary_dim <= head_dim:
            return rotary_dim / head_dim
        parameters = text.get("rope_parameters")
        nested = parameters.get("partial_rotary_factor") if isinstance(parameters, dict) else None
        fraction = text.get("partial_rotary_factor", text.get("rotary_pct", nested))
        known = isinstance(fraction, (int, float)) and not isinstance(fraction, bool) and 0 < fraction <= 1
        return float(fraction) if known else self.rotary_fraction
