"""What a converted model should compute, worked out inside the stock module and never from files.

The stock model keeps all its K/V heads, but every head of a group is overwritten by the group's mean. A
correct conversion computes the same function with one head for each group.

Each layout below says where the K/V heads of a stock class lie. It was written from the ``forward`` of that
class, and knows nothing of checkpoints, tensor names in files or the code under test.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

QUERY_HEADS = 8


@dataclass(frozen=True)
class HeadStack:
    """One parameter of one layer, cut into its K/V heads; ``heads[j]`` is a view that can be written to."""

    role: Literal["key", "value", "norm"]
    heads: tuple[Tensor, ...]


Layout = Callable[[PreTrainedModel, int], Iterator[HeadStack]]
Grouping = Callable[[int, int], list[list[int]]]


def consecutive(heads: int, groups: int) -> list[list[int]]:
    """Return head numbers such as [[0, 1], [2, 3]]: what grouped-query attention means by a group."""
    size = heads // groups
    return [list(range(first, first + size)) for first in range(0, heads, size)]


def strided(heads: int, groups: int) -> list[list[int]]:
    """Return head numbers such as [[0, 2], [1, 3]]: the common mistake, used as a control."""
    return [list(range(first, heads, groups)) for first in range(groups)]


def separate(model: PreTrainedModel, kv_heads: int) -> Iterator[HeadStack]:
    """``k_proj`` and ``v_proj``, head after head; a K norm of width head_dim is shared by all heads."""
    for attention in _attention_modules(model, "k_proj"):
        for kind in ("weight", "bias"):
            for role, projection in (("key", attention.k_proj), ("value", attention.v_proj)):
                parameter = getattr(projection, kind)
                if parameter is not None:
                    yield HeadStack(cast(Any, role), parameter.data.chunk(kv_heads))


def separate_and_spanning_norm(model: PreTrainedModel, kv_heads: int) -> Iterator[HeadStack]:
    """As `separate`, with a ``k_norm`` that has weights of its own for each head, as (G*D) or as (G, D)."""
    yield from separate(model, kv_heads)
    for attention in _attention_modules(model, "k_norm"):
        yield HeadStack("norm", attention.k_norm.weight.data.chunk(kv_heads))


def separate_and_norm_modules(model: PreTrainedModel, kv_heads: int) -> Iterator[HeadStack]:
    """As `separate`, with one LayerNorm module for each K head."""
    yield from separate(model, kv_heads)
    for attention in _attention_modules(model, "k_layernorm"):
        norms = list(attention.k_layernorm.norms)
        assert len(norms) == kv_heads
        yield HeadStack("norm", tuple(norm.weight.data for norm in norms))


def blocks(projection: str) -> Layout:
    """One fused projection: the rows of all query heads, then of all K heads, then of all V heads."""

    def layout(model: PreTrainedModel, kv_heads: int) -> Iterator[HeadStack]:
        for attention in _attention_modules(model, projection):
            for parameter in getattr(attention, projection).parameters():
                head_dim = parameter.shape[0] // (QUERY_HEADS + 2 * kv_heads)
                rows = [QUERY_HEADS * head_dim, kv_heads * head_dim, kv_heads * head_dim]
                _, keys, values = parameter.data.split(rows)
                yield HeadStack("key", keys.chunk(kv_heads))
                yield HeadStack("value", values.chunk(kv_heads))

    return layout


def interleaved(projection: str) -> Layout:
    """One fused projection: for each K/V head the rows of its query heads, then its K, then its V."""

    def layout(model: PreTrainedModel, kv_heads: int) -> Iterator[HeadStack]:
        for attention in _attention_modules(model, projection):
            for parameter in getattr(attention, projection).parameters():
                heads_per_group = QUERY_HEADS // kv_heads + 2
                groups = [group.chunk(heads_per_group) for group in parameter.data.chunk(kv_heads)]
                yield HeadStack("key", tuple(group[-2] for group in groups))
                yield HeadStack("value", tuple(group[-1] for group in groups))

    return layout


def expanded_reference(
    model: PreTrainedModel, layout: Layout, kv_heads: int, target: int, grouping: Grouping = consecutive
) -> PreTrainedModel:
    """Copy ``model`` and overwrite each K/V head by the mean of its group, taken in float64 and cast once."""
    expanded = copy.deepcopy(model)
    stacks = list(layout(expanded, kv_heads))
    assert stacks, "the layout found no K/V heads"
    for stack in stacks:
        for members in grouping(kv_heads, target):
            _share_mean([stack.heads[member] for member in members])
    return expanded


def key_and_value_exchanged(model: PreTrainedModel, layout: Layout, kv_heads: int) -> PreTrainedModel:
    """Copy ``model`` with K and V swapped: what a wrong order inside a fused projection would compute."""
    exchanged = copy.deepcopy(model)
    stacks = list(layout(exchanged, kv_heads))
    keys = [stack for stack in stacks if stack.role == "key"]
    values = [stack for stack in stacks if stack.role == "value"]
    assert keys, "the layout found no K/V heads"
    for key, value in zip(keys, values, strict=True):
        for key_head, value_head in zip(key.heads, value.heads, strict=True):
            kept = key_head.clone()
            key_head.copy_(value_head)
            value_head.copy_(kept)
    return exchanged


def _attention_modules(model: PreTrainedModel, child: str) -> Iterator[Any]:
    """Yield the modules that own a child module of that name."""
    for module in model.modules():
        if isinstance(getattr(module, child, None), nn.Module):
            yield module


def _share_mean(members: Sequence[Tensor]) -> None:
    mean = torch.stack([member.to(torch.float64) for member in members]).mean(dim=0)
    for member in members:
        member.copy_(mean)
