"""Which source rows every output row comes from, written from the definition of grouped-query attention.

On purpose not from the planner: validating a conversion with the code that made it would repeat its mistakes. Here
the rows of a projection are numbered and cut as a stock ``forward`` cuts its activations, which says where each head
lies. No torch.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gqaconvert.checkpoint.headers import TensorEntry, Transposed
from gqaconvert.families import Form, Layout, Part
from gqaconvert.families.sites import AttentionGeometry, AttentionSite, SiteTensor


@dataclass(frozen=True)
class Segment:
    """Consecutive output rows, and where the rows lie that they are made from: (tensor, first row), one a head."""

    row: int
    rows: int
    sources: tuple[tuple[TensorEntry, int], ...]


@dataclass(frozen=True)
class ExpectedTensor:
    """One tensor of the output.

    Attributes:
        name: in the output.
        dtype: safetensors name.
        shape: in the output.
        segments: how it is made.
        source: the tensor that it stands for.
        layer: of its attention module, -1 outside of those.
        kind: weights, biases or norms for those that are computed, untouched for those that are not.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    segments: tuple[Segment, ...]
    source: TensorEntry
    layer: int = -1
    kind: str = "untouched"


def head_rows(part: Part, layout: Layout, geometry: AttentionGeometry) -> dict[Part, list[slice]]:
    """The rows of every head of a projection, for query, key and value."""
    heads, kv_heads = geometry.num_attention_heads, geometry.num_key_value_heads
    if part in (Part.KEY, Part.KEY_NORM):
        return {Part.KEY: _blocks(kv_heads, geometry.head_dim)}
    if part is Part.VALUE:
        return {Part.VALUE: _blocks(kv_heads, geometry.value_head_dim)}
    if part is Part.QUERY:
        return {Part.QUERY: _blocks(heads, geometry.head_dim)}
    blocks = _blocks(heads + 2 * kv_heads, geometry.head_dim)
    if layout is Layout.GROUPS:
        # Stock classes view them as (kv_heads, queries_per_kv + 2, head_dim).
        width = heads // kv_heads + 2
        groups = [blocks[start : start + width] for start in range(0, len(blocks), width)]
        return {
            Part.QUERY: [block for group in groups for block in group[:-2]],
            Part.KEY: [group[-2] for group in groups],
            Part.VALUE: [group[-1] for group in groups],
        }
    return {Part.QUERY: blocks[:heads], Part.KEY: blocks[heads:-kv_heads], Part.VALUE: blocks[-kv_heads:]}


def _blocks(count: int, size: int) -> list[slice]:
    """The rows 0 to count * size - 1, ``size`` of them a head: what ``view(count, size)`` says."""
    return [slice(start, start + size) for start in range(0, count * size, size)]


def members(head: int, source_count: int, target_count: int) -> list[int]:
    """The source KV heads behind KV head ``head`` of the output; consecutive, as `repeat_interleave` undoes it."""
    if target_count >= source_count:
        return [head // (target_count // source_count)]
    return [number for number in range(source_count) if number // (source_count // target_count) == head]


def computed_tensors(
    site: AttentionSite,
    tensor: SiteTensor,
    layouts: tuple[Layout, Layout],
    target: AttentionGeometry,
    different: int,
) -> Iterator[ExpectedTensor]:
    """What becomes of one tensor that K or V lie in; ``different`` KV heads are among the target's."""
    entry, geometry = tensor.entry, site.geometry
    source_count, count = geometry.num_key_value_heads, target.num_key_value_heads
    if tensor.part is Part.KEY_NORM_LIST:
        if tensor.number:
            return
        siblings = {other.number: other.entry for other in site.tensors if (other.part, other.leaf) == tensor[2:4]}
        for head in range(count):
            sources = tuple(
                (siblings[number], 0) for number in members(head // (count // different), source_count, different)
            )
            name = f"{site.prefix}{tensor.name}.norms.{head}.{tensor.leaf}"
            segment = Segment(0, entry.numel, sources)
            yield ExpectedTensor(name, entry.dtype, entry.shape, (segment,), entry, site.layer, "norms")
        return
    before, after = head_rows(tensor.part, layouts[0], geometry), head_rows(tensor.part, layouts[1], target)
    segments = []
    for part, numbers in after.items():
        for head, rows in enumerate(numbers):
            behind = [head] if part is Part.QUERY else members(head // (count // different), source_count, different)
            sources = tuple((entry, before[part][other].start) for other in behind)
            segments.append(Segment(rows.start, rows.stop - rows.start, sources))
    segments.sort(key=lambda segment: segment.row)
    shape = (entry.shape[0] * _count(after) // _count(before), *entry.shape[1:])
    kind = "norms" if tensor.part is Part.KEY_NORM else "biases" if tensor.leaf == "bias" else "weights"
    yield ExpectedTensor(entry.name, entry.dtype, shape, tuple(segments), entry, site.layer, kind)


def _count(rows: Mapping[Part, list[slice]]) -> int:
    return sum(block.stop - block.start for blocks in rows.values() for block in blocks)


COMPUTED = frozenset((Part.KEY, Part.VALUE, Part.QKV, Part.KEY_NORM, Part.KEY_NORM_LIST))


def expected_tensors(
    entries: Mapping[str, TensorEntry],
    sites: tuple[AttentionSite, ...],
    layouts: tuple[Layout, Layout],
    kv_heads: int,
    form: Form | None = None,
    different: int | None = None,
) -> list[ExpectedTensor]:
    """Every tensor of an output in this form, in the source's order.

    Of its ``kv_heads`` KV heads, ``different`` ones differ, where heads are stored as often as they are read.
    """
    roles = {tensor.entry.name: (site, tensor) for site in sites for tensor in site.tensors}
    expected: list[ExpectedTensor] = []
    for name, entry in entries.items():
        site, tensor = roles.get(name, (None, None))
        if site is not None and tensor is not None and tensor.part in COMPUTED:
            target = site.geometry.with_kv_heads(kv_heads)
            expected += computed_tensors(site, tensor, layouts, target, different or kv_heads)
        elif tensor is not None and isinstance(tensor.entry, Transposed):
            assert site is not None
            place = tensor.entry
            whole = (Segment(0, place.shape[0], ((place, 0),)),)
            expected.append(ExpectedTensor(name, place.dtype, place.shape, whole, place, site.layer))
        elif form is not None and site is None and form.drops and re.search(form.drops, name):
            continue
        else:
            if form is not None and form.linear and re.search(form.linear, name):
                entry = Transposed.of(entry)
            rows = entry.shape[0] if entry.shape else 1
            layer = -1 if site is None else site.layer
            whole = (Segment(0, rows, ((entry, 0),)),)
            expected.append(ExpectedTensor(name, entry.dtype, entry.shape, whole, entry, layer))
    return expected


def kv_heads_of(site: AttentionSite, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """The KV heads that an output's shapes show at the place of a source's attention module, None if they make none."""
    geometry = site.geometry
    key, fused = site.find(Part.KEY), site.find(Part.QKV)
    entry = key or fused
    rows = shapes.get(entry.name, (0,))[0] if entry else 0
    count, rest = divmod(rows, geometry.head_dim)
    if fused is not None:
        count, odd = divmod(count - geometry.num_attention_heads, 2)
        rest += odd
    return None if rest or count < 1 or geometry.num_attention_heads % count else count
