"""How heads follow each other in tensors: every tensor of K or V is a row of head blocks along its output axis."""

from typing import NamedTuple

from gqaconvert.families.family import Layout, Part
from gqaconvert.families.sites import AttentionGeometry


class Block(NamedTuple):
    """The rows of one head: ``part`` is QUERY, KEY or VALUE."""

    part: Part
    head: int
    rows: int


def head_blocks(part: Part, layout: Layout, geometry: AttentionGeometry) -> list[Block]:
    """The blocks of a tensor with this role along its output axis."""
    heads, kv_heads = geometry.num_attention_heads, geometry.num_key_value_heads
    queries = [Block(Part.QUERY, head, geometry.head_dim) for head in range(heads)]
    keys = [Block(Part.KEY, head, geometry.head_dim) for head in range(kv_heads)]
    values = [Block(Part.VALUE, head, geometry.value_head_dim) for head in range(kv_heads)]
    if part is Part.QUERY:
        return queries
    if part is Part.VALUE:
        return values
    if part in (Part.KEY, Part.KEY_NORM):
        return keys
    assert part is Part.QKV
    if layout is Layout.BLOCKS:
        return queries + keys + values
    assert layout is Layout.GROUPS
    share = geometry.queries_per_kv
    return [
        block
        for group in range(kv_heads)
        for block in (*queries[group * share : (group + 1) * share], keys[group], values[group])
    ]


def source_heads(head: int, source_count: int, target_count: int) -> range:
    """The source KV heads that make up KV head ``head`` of the output: consecutive ones, or one that is repeated."""
    if target_count <= source_count:
        size = source_count // target_count
        return range(head * size, (head + 1) * size)
    return range(head * source_count // target_count, head * source_count // target_count + 1)
