"""Which KV heads to merge with which: balanced groups of heads that one head can stand for.

Neighbours have nothing in common in a model trained with full multi-head attention, so that any partition is legal
where the order of heads is free. The cost of a group is the energy that its merge loses.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import torch

from gqaconvert.merge.groups import group_size, in_float64, rotary_fits, symmetric
from gqaconvert.merge.subspace import output_metrics, query_metrics, shared_key, shared_value

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from gqaconvert.merge.heads import AttentionHeads, Rotary

_EXACT = 600
"""Groups whose true cost is computed, at most, before the pairwise estimate has to do."""


def group_by_mergeability(
    heads: AttentionHeads,
    num_key_value_heads: int,
    *,
    rotary: Rotary,
    moment: Tensor | None = None,
) -> list[int]:
    """Order the KV heads such that consecutive ones merge well.

    The cost of a group is the share of the layer's K energy plus the share of its V energy that the subspace merge
    loses. Groups of equal size are improved by exchanging heads: first with pairwise costs, then, if there are few
    enough groups to try, with the true ones. Never worse than the order given.

    Args:
        heads: of one layer.
        num_key_value_heads: after the merge.
        rotary: the position scheme and what it leaves free.
        moment: (E', E') mean of x x^T over calibration inputs, or None.

    Returns:
        A permutation for ``permute_heads``: heads ascending within a group, groups by their first head.

    Raises:
        ValueError: the counts or the shapes do not fit.
    """
    size = group_size(heads, num_key_value_heads)
    rotary_fits(heads, rotary)
    count = heads.num_key_value_heads
    adjacent = [list(range(start, start + size)) for start in range(0, count, size)]
    if size == 1 or num_key_value_heads == 1:
        return list(range(count))
    cost = _Cost(heads, rotary, moment)
    pairwise = torch.zeros(count, count, dtype=torch.float64)
    for one, other in combinations(range(count), 2):
        pairwise[one, other] = pairwise[other, one] = cost((one, other))

    def estimate(group: Sequence[int]) -> float:
        return float(pairwise[list(group)][:, list(group)].sum()) / 2

    best = _exchange(adjacent, estimate)
    if count * count * num_key_value_heads <= _EXACT:
        best = _exchange(best, cost)
    if sum(map(cost, best)) > sum(map(cost, adjacent)):
        best = adjacent
    return [head for group in sorted(sorted(group) for group in best) for head in group]


class _Cost:
    """Energy lost by merging a group of heads, in shares of the layer's."""

    def __init__(self, heads: AttentionHeads, rotary: Rotary, moment: Tensor | None) -> None:
        self._heads = in_float64(heads)
        self._rotary = rotary
        self._metric = None if moment is None else symmetric(moment, heads.key.shape[2])
        self._queries = query_metrics(self._heads, self._metric)
        self._outputs = output_metrics(self._heads)
        self._known: dict[tuple[int, ...], tuple[float, float, float, float]] = {}
        singles = [self._energies((head,)) for head in range(heads.num_key_value_heads)]
        self._key_total = sum(single[1] for single in singles) or 1.0
        self._value_total = sum(single[3] for single in singles) or 1.0

    def __call__(self, group: Sequence[int]) -> float:
        key_kept, key_whole, value_kept, value_whole = self._energies(tuple(sorted(group)))
        return (key_whole - key_kept) / self._key_total + (value_whole - value_kept) / self._value_total

    def _energies(self, group: tuple[int, ...]) -> tuple[float, float, float, float]:
        if group not in self._known:
            members = list(group)
            key = shared_key(self._heads.key[members], self._queries[members], self._rotary, self._metric)
            value = shared_value(self._heads.value[members], self._outputs[members], self._rotary, self._metric)
            self._known[group] = (float(key.kept), float(key.whole), float(value.kept), float(value.whole))
        return self._known[group]


def _exchange(groups: list[list[int]], cost: Callable[[Sequence[int]], float]) -> list[list[int]]:
    """Exchange two heads of two groups as long as the summed cost falls, best exchange of each pair of groups first."""
    groups = [list(group) for group in groups]
    costs = [cost(group) for group in groups]
    improved = True
    while improved:
        improved = False
        for one, other in combinations(range(len(groups)), 2):
            now = costs[one] + costs[other]
            best: tuple[float, list[int], list[int]] | None = None
            for place, head in enumerate(groups[one]):
                for other_place, other_head in enumerate(groups[other]):
                    first = [*groups[one][:place], other_head, *groups[one][place + 1 :]]
                    second = [*groups[other][:other_place], head, *groups[other][other_place + 1 :]]
                    total = cost(first) + cost(second)
                    if total < now - 1e-12 and (best is None or total < best[0]):
                        best = (total, first, second)
            if best is not None:
                groups[one], groups[other] = best[1], best[2]
                costs[one], costs[other] = cost(best[1]), cost(best[2])
                improved = True
    return groups
