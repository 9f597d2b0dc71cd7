"""Merging group by group: what every site method shares, whatever its solver for one group is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gqaconvert.merge.heads import AttentionHeads, Rotary

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Solve = Callable[[AttentionHeads, Rotary, Tensor | None], tuple["Shared", "Shared"]]

RIDGE = 1e-7
"""Relative weight of the identity in metrics: keeps them invertible, far below what a stored dtype resolves."""


@dataclass(frozen=True)
class MergeResult:
    """Merged heads, and how much of each group they hold.

    Attributes:
        heads: with the asked number of KV heads; shapes of query and output as before.
        key_explained: (groups,), share of the weighted energy of K that the shared head holds, in [0, 1].
        value_explained: (groups,), the same for V.
    """

    heads: AttentionHeads
    key_explained: Tensor
    value_explained: Tensor


@dataclass(frozen=True)
class Shared:
    """One head for the n heads of a group: ``W_j ~ B_j W``.

    Attributes:
        weight: W (d, E').
        bases: B (n, d, d), to be folded into the readers: ``reader -> B_j^T reader``.
        kept: energy of the heads that ``B_j W`` holds.
        whole: energy of the heads.
    """

    weight: Tensor
    bases: Tensor
    kept: Tensor
    whole: Tensor

    @property
    def explained(self) -> Tensor:
        """Kept / whole in [0, 1]; 1 if there is nothing to keep."""
        some = self.whole > 0
        return torch.where(some, self.kept / torch.where(some, self.whole, 1.0), 1.0).clamp(0.0, 1.0)


def merge_groups(
    heads: AttentionHeads, num_key_value_heads: int, *, rotary: Rotary, moment: Tensor | None, solve: Solve
) -> MergeResult:
    """Replace each group of consecutive KV heads by one, and fold the changes of basis into Q and O.

    Args:
        heads: of one layer; any float type, computed in float64.
        num_key_value_heads: after the merge; divides the count before. With the same count nothing changes.
        rotary: the position scheme and what it leaves free.
        moment: (E', E') float64, the mean of x x^T over calibration inputs (with the constant 1 appended where
            ``heads`` have a bias column); None weighs all input directions alike.
        solve: gives the shared K and the shared V of one group's heads.

    Returns:
        The merged heads in float64, finite for finite input.

    Raises:
        ValueError: the counts or the shapes do not fit.
    """
    size = group_size(heads, num_key_value_heads)
    rotary_fits(heads, rotary)
    heads = in_float64(heads)
    ones = torch.ones(num_key_value_heads, dtype=torch.float64, device=heads.key.device)
    if size == 1:
        return MergeResult(heads, ones, ones)
    metric = None if moment is None else symmetric(moment, heads.key.shape[2])
    queries = size * heads.queries_per_kv
    solved = []
    for group in range(num_key_value_heads):
        kv, readers = slice(group * size, (group + 1) * size), slice(group * queries, (group + 1) * queries)
        members = AttentionHeads(heads.query[readers], heads.key[kv], heads.value[kv], heads.output[readers])
        solved.append(solve(members, rotary, metric))
    keys, values = [key for key, _ in solved], [value for _, value in solved]
    return MergeResult(
        fold(heads, keys, values),
        torch.stack([key.explained for key in keys]),
        torch.stack([value.explained for value in values]),
    )


def fold(heads: AttentionHeads, keys: Sequence[Shared], values: Sequence[Shared]) -> AttentionHeads:
    """The layer with shared heads, one of each a group, and their changes of basis in Q and O."""
    key_bases, value_bases = (
        torch.cat([part.bases for part in parts]).repeat_interleave(heads.queries_per_kv, dim=0).mT
        for parts in (keys, values)
    )
    return AttentionHeads(
        query=key_bases @ heads.query,
        key=torch.stack([part.weight for part in keys]),
        value=torch.stack([part.weight for part in values]),
        output=value_bases @ heads.output,
    )


def group_size(heads: AttentionHeads, num_key_value_heads: int) -> int:
    """KV heads that become one.

    Raises:
        ValueError: the count does not divide the number of KV heads.
    """
    source = heads.num_key_value_heads
    if num_key_value_heads < 1 or source % num_key_value_heads:
        raise ValueError(f"{source} KV heads cannot become {num_key_value_heads}: the count must divide them")
    return source // num_key_value_heads


def rotary_fits(heads: AttentionHeads, rotary: Rotary) -> None:
    """Check that the heads have the dimensions that are rotated.

    Raises:
        ValueError: they have fewer.
    """
    if rotary.dim > heads.key.shape[1]:
        raise ValueError(f"{rotary.dim} rotated dimensions in heads of {heads.key.shape[1]}")


def in_float64(heads: AttentionHeads) -> AttentionHeads:
    """The same heads in float64."""
    parts = (heads.query, heads.key, heads.value, heads.output)
    return AttentionHeads(*(part.to(torch.float64) for part in parts))


def symmetric(moment: Tensor, columns: int) -> Tensor:
    """A second moment made exactly symmetric and positive definite, of mean eigenvalue 1; zero becomes the identity.

    Raises:
        ValueError: it is not (columns, columns), or not finite.
    """
    if tuple(moment.shape) != (columns, columns):
        raise ValueError(f"a second moment of shape {tuple(moment.shape)} for projections of {columns} columns")
    if not torch.isfinite(moment).all():
        raise ValueError("the second moment has NaN or infinite values")
    moment = moment.to(torch.float64)
    moment = (moment + moment.T) / 2
    eye = torch.eye(columns, dtype=moment.dtype, device=moment.device)
    scale = moment.trace() / columns
    return (moment / scale + RIDGE * eye) if scale > 0 else eye


def apply_moment(weights: Tensor, moment: Tensor | None) -> Tensor:
    """``W M``; without a moment, W."""
    return weights if moment is None else weights @ moment
