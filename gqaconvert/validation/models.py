"""Stock models of both sides, in float32, and the expanded reference. Needs transformers.

Everything is computed in float32: many CPUs multiply 16-bit floats a hundred times slower, and the question is whether
the weights compute the same function, not how it rounds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gqaconvert.checkpoint.headers import Transposed
from gqaconvert.errors import CheckpointError
from gqaconvert.families import Part
from gqaconvert.validation.compare import recomputed
from gqaconvert.validation.numbers import nearest
from gqaconvert.validation.rows import COMPUTED, ExpectedTensor, Segment, head_rows, members
from gqaconvert.validation.shards import Shards, torch_type

if TYPE_CHECKING:
    from gqaconvert.validation.pair import Pair


def expand(model: Any, pair: Pair) -> None:  # noqa: ANN401
    """Turn the source's model into the expanded reference: every head of a group becomes the group's shared head.

    For exact methods the shared head is recomputed from the source; others give it themselves, with their Q and O.

    Raises:
        CheckpointError: the files' names are not those of the stock class.
    """
    parameters = dict(model.named_parameters())
    expected = {tensor.name: tensor for tensor in pair.expected}
    exact = pair.record.trained is None and (pair.grew or pair.expectation.promise in ("mean", "first"))
    merged = pair.merged_names()
    with Shards(pair.source_folder.root) as source, Shards(pair.folder.root) as output, torch.no_grad():
        for name in pair.trained_names():
            if expected[name].kind == "untouched" and (own := _find(parameters, name)) is not None:
                own.copy_(output.tensor(pair.index.entries[name]))
        for site in pair.source.sites:
            geometry = site.geometry
            target = geometry.with_kv_heads(pair.kv_heads)
            for tensor in site.tensors:
                part, entry = tensor.part, tensor.entry
                if part not in COMPUTED and entry.name not in merged:
                    continue
                place = _parameter(parameters, entry.name)
                turned = isinstance(entry, Transposed)
                if part in (Part.QUERY, Part.OUTPUT):
                    value = output.tensor(pair.index.entries[entry.name])
                    place.copy_(value.T if turned else value)
                    continue
                number = tensor.number
                if part is Part.KEY_NORM_LIST:
                    kv = _group(number, geometry.num_key_value_heads, pair.kv_heads)
                    wanted = expected[f"{site.prefix}{tensor.name}.norms.{kv}.{tensor.leaf}"]
                    place.copy_(
                        _shared(pair, wanted, wanted.segments[0], source, output, exact=exact, size=1).view_as(place)
                    )
                    continue
                wanted = expected[entry.name]
                before, after = head_rows(part, pair.layouts[0], geometry), head_rows(part, pair.layouts[1], target)
                by_row = {segment.row: segment for segment in wanted.segments}
                size = entry.numel // max(block.stop for blocks in before.values() for block in blocks)
                flat = place.T if turned else place.view(-1, size)
                for role, rows in before.items():
                    for head, numbers in enumerate(rows):
                        shared = head
                        if role is not Part.QUERY:
                            shared = _group(head, geometry.num_key_value_heads, pair.kv_heads)
                        segment = by_row[after[role][shared].start]
                        flat[numbers] = _shared(pair, wanted, segment, source, output, exact=exact, size=size)


def _group(head: int, source_count: int, target_count: int) -> int:
    """The output's KV head that stands for KV head ``head`` of the source (the first, where heads are repeated)."""
    if target_count >= source_count:
        return head * (target_count // source_count)
    return next(number for number in range(target_count) if head in members(number, source_count, target_count))


def _shared(
    pair: Pair,
    wanted: ExpectedTensor,
    segment: Segment,
    source: Shards,
    output: Shards,
    *,
    exact: bool,
    size: int,
) -> Tensor:
    entry = pair.index.entries[wanted.name]
    if not exact:
        return output.rows(entry, segment.row, segment.rows, size).to(torch.float32)
    heads = [source.rows(place, row, segment.rows, size) for place, row in segment.sources]
    pooling: Callable[[list[Tensor]], Tensor] = recomputed(pair, wanted)
    return nearest(pooling(heads), torch_type(entry.dtype)).to(torch.float32)


def _parameter(parameters: dict[str, Tensor], name: str) -> Tensor:
    if (found := _find(parameters, name)) is None:
        raise CheckpointError(f"the stock class has no parameter {name}", hint="--level files needs no model")
    return found


def _find(parameters: dict[str, Tensor], name: str) -> Tensor | None:
    found = [key for key in parameters if key == name or key.endswith(f".{name}") or name.endswith(f".{key}")]
    return parameters[found[0]] if len(found) == 1 else None
