"""Source and output, opened side by side, and what the one says the other should be."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gqaconvert.checkpoint import dtypes
from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.index import CheckpointIndex, read_index, read_json
from gqaconvert.errors import GqaConvertError, InputError
from gqaconvert.families import KV_HEADS, Layout, Part
from gqaconvert.families.config import KV_HEADS as KV_HEAD_KEYS
from gqaconvert.families.config import ModelConfig
from gqaconvert.families.sites import form_for, output_layout, rewritten
from gqaconvert.inspection import Checkpoint, read_checkpoint
from gqaconvert.sidecars import CONFIG
from gqaconvert.validation.methods import EXPECTATIONS, Expectation
from gqaconvert.validation.record import Record, read_record
from gqaconvert.validation.rows import ExpectedTensor, expected_tensors, kv_heads_of


@dataclass(frozen=True)
class Pair:
    """A source and its output.

    Attributes:
        source: the source.
        index: the output's tensors.
        config: the output's config.json.
        record: the output's gqaconvert.json.
        kv_heads: of the output, as its weights show.
        layouts: of the projections, before and after.
        config_changes: what config.json must say in the output.
        expected: every tensor that the output must have.
    """

    source: Checkpoint
    index: CheckpointIndex
    config: ModelConfig
    record: Record
    kv_heads: int
    layouts: tuple[Layout, Layout]
    config_changes: Mapping[str, Any]
    expected: tuple[ExpectedTensor, ...]

    @property
    def method(self) -> str:
        """Merge method, mean where no record says another."""
        return self.record.method

    @property
    def grew(self) -> bool:
        """Whether heads are repeated, which is the same for every method."""
        return self.kv_heads > self.source.sites[0].geometry.num_key_value_heads

    @property
    def expectation(self) -> Expectation:
        """What the method promises."""
        return EXPECTATIONS["mean"] if self.grew else EXPECTATIONS[self.method]

    @property
    def source_folder(self) -> LocalFolder:
        """Where the source lies."""
        assert isinstance(self.source.files, LocalFolder)
        return self.source.files

    @property
    def folder(self) -> LocalFolder:
        """Where the output lies."""
        assert isinstance(self.index.files, LocalFolder)
        return self.index.files

    def merged_names(self) -> frozenset[str]:
        """Names of the tensors that a method of the whole site, or a training, writes anew."""
        if not self.expectation.rewrites_queries and self.record.trained is None:
            return frozenset()
        return frozenset(entry.name for site in self.source.sites for _, _, entry in rewritten(site))

    def trained_names(self) -> frozenset[str]:
        """Names of all other tensors that a training may have changed."""
        if self.record.trained is None:
            return frozenset()
        named = {tensor.name for tensor in self.expected if tensor.kind != "untouched"}
        if self.record.trained == "all":
            named |= {tensor.name for tensor in self.expected}
        else:
            named |= {tensor.entry.name for site in self.source.sites for tensor in site.tensors}
        return frozenset(named) - self.merged_names()

    def expected_config(self) -> dict[str, Any]:
        """The source's config.json with exactly the declared changes."""
        document = copy.deepcopy(dict(self.source.config.raw))
        level = document
        for key in self.source.config.path:
            level = level[key]
        for key, value in self.config_changes.items():
            level[key] = value
            if key in document:
                document[key] = value
        stored = self.record.dtype
        if stored is not None:
            for place in (document, *(value for value in document.values() if isinstance(value, dict))):
                for key in ("dtype", "torch_dtype"):
                    if key in place:
                        place[key] = dtypes.TORCH_NAMES[stored]
        return document


def open_pair(source: LocalFolder, folder: LocalFolder, *, family: str | None = None) -> Pair:
    """Read both sides' headers and JSON.

    Raises:
        CheckpointError: one of them is no readable checkpoint.
        InputError: the output is no conversion of this source, or by a method that is not known here.
    """
    record = read_record(folder)
    before = read_checkpoint(source, family=family or record.family)
    sites = before.require_sites()
    index, config = read_index(folder), ModelConfig.of(read_json(folder, CONFIG))
    if record.method not in EXPECTATIONS:
        raise InputError(
            f"{folder.root} was made by the method {record.method[:60]!r}, which this version does not know",
            hint="validate it with the version that made it",
        )
    shapes = {name: entry.shape for name, entry in index.entries.items()}
    present = sites[0].geometry.num_key_value_heads
    count = next((found for site in sites if (found := kv_heads_of(site, shapes))), None)
    if count in (None, present):  # weights that were not converted: judged by what they were meant to be
        count = _declared(record, config) or count
    if count == present:
        raise InputError(
            f"{folder.root} has as many KV heads as {source.root}: it is no conversion", hint="give SRC and DST"
        )
    if count is None:
        raise InputError(
            f"{folder.root} has no attention like that of {source.root}", hint="are these the two folders?"
        )
    chosen, geometry = before.require_family(), sites[0].geometry
    changes: Mapping[str, Any] = {}
    layouts = (chosen.layout, chosen.layout)
    if count != geometry.num_key_value_heads:
        form = form_for(chosen, before.config, geometry, count)
        changes = {key: count if value is KV_HEADS else value for key, value in form.config.items()}
        layouts = (chosen.layout, output_layout(chosen, form))
    expected = expected_tensors(before.index.entries, sites, layouts, count)
    return Pair(before, index, config, record, count, layouts, changes, tuple(expected))


def _declared(record: Record, config: ModelConfig) -> int | None:
    if record.num_key_value_heads is not None:
        return record.num_key_value_heads
    try:
        return config.count(KV_HEAD_KEYS)
    except GqaConvertError:
        return None


def stored_type(pair: Pair, tensor: ExpectedTensor) -> str:
    """The type that a tensor must have in the output."""
    stored = pair.record.dtype
    return stored if stored is not None and tensor.dtype in dtypes.TORCH_NAMES else tensor.dtype


QUERY_SIDE = frozenset((Part.QUERY, Part.OUTPUT))
