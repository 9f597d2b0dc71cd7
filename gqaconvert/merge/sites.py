"""Attention sites as heads and back: tensors of any layout -> `AttentionHeads` -> tensors of the output's layout."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gqaconvert.families import Layout, Part
from gqaconvert.families.blocks import head_blocks
from gqaconvert.families.sites import AttentionGeometry, AttentionSite, rewritten
from gqaconvert.merge.align import merge_aligned
from gqaconvert.merge.groups import MergeResult
from gqaconvert.merge.heads import AttentionHeads, Rotary
from gqaconvert.merge.subspace import merge_subspace

SiteMerge = Callable[[AttentionHeads, int, Rotary, Tensor | None], MergeResult]


def site_merge(method: str) -> SiteMerge:
    """The function behind a site method's name."""
    function = {"subspace": merge_subspace, "align": merge_aligned}[method]
    return lambda heads, count, rotary, moment: function(heads, count, rotary=rotary, moment=moment)


def load_heads(tensors: Mapping[str, Tensor], site: AttentionSite, layout: Layout) -> AttentionHeads:
    """The site's projections as heads, in the type of ``tensors``; biases, where any exist, as a last column.

    Args:
        tensors: of `rewritten`, by name: weights (rows, E), biases (rows,).
        site: the attention module.
        layout: of its projections.
    """
    geometry = site.geometry
    rows: dict[tuple[Part, int], Tensor] = {}
    has_bias = any(leaf == "bias" for _, leaf, _ in rewritten(site))
    for part, leaf, entry in rewritten(site):
        if part is Part.OUTPUT or leaf != "weight":
            continue
        weight = tensors[entry.name]
        if has_bias:
            bias = site.find(part, "bias")
            column = weight.new_zeros(len(weight), 1) if bias is None else tensors[bias.name][:, None]
            weight = torch.cat([weight, column.to(weight.dtype)], dim=1)
        start = 0
        for block in head_blocks(part, layout, geometry):
            rows[block.part, block.head] = weight[start : start + block.rows]
            start += block.rows
    output = site.find(Part.OUTPUT)
    assert output is not None
    heads = geometry.num_attention_heads
    columns = tensors[output.name].T.reshape(heads, geometry.value_head_dim, -1)

    def stacked(part: Part, count: int) -> Tensor:
        return torch.stack([rows[part, head] for head in range(count)])

    kv_heads = geometry.num_key_value_heads
    return AttentionHeads(
        query=stacked(Part.QUERY, heads),
        key=stacked(Part.KEY, kv_heads),
        value=stacked(Part.VALUE, kv_heads),
        output=columns,
    )


def store_heads(
    heads: AttentionHeads, site: AttentionSite, layout: Layout, target: AttentionGeometry
) -> dict[str, Tensor]:
    """The tensors of `rewritten`, by name, in the output's layout."""
    parts = {Part.QUERY: heads.query, Part.KEY: heads.key, Part.VALUE: heads.value}
    result: dict[str, Tensor] = {}
    for part, leaf, entry in rewritten(site):
        if part is Part.OUTPUT:
            result[entry.name] = heads.output.flatten(0, 1).T
            continue
        blocks = [parts[block.part][block.head] for block in head_blocks(part, layout, target)]
        stacked = torch.cat(blocks)
        columns = entry.shape[1] if leaf == "weight" else 0
        result[entry.name] = stacked[:, :columns] if leaf == "weight" else stacked[:, -1]
    return result
