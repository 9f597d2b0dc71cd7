"""The subspace merge: one KV head for several, in closed form, keeping as much of the function as one head can.

V may be written in any basis if O undoes it, and K in any basis that commutes with the position scheme if Q undoes it.
So instead of averaging heads that have nothing in common, the merge looks for the d dimensions (for rotated keys: the
one complex direction per frequency) from which all heads of the group, each with its own change of basis, are best
restored. That is a principal component analysis, weighted by how much the output projection, or the queries, see. All
of it needs Gram matrices only: n x n per rotary frequency, n*d x n*d for a block, with n heads of d dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gqaconvert.merge.heads import AttentionHeads, KeyFreedom, Rotary

if TYPE_CHECKING:
    from collections.abc import Sequence

_RIDGE = 1e-7
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


def merge_subspace(
    heads: AttentionHeads,
    num_key_value_heads: int,
    *,
    rotary: Rotary,
    moment: Tensor | None = None,
) -> MergeResult:
    """Merge each group of consecutive KV heads into one, folding the changes of basis into Q and O.

    Args:
        heads: of one layer; any float type, computed in float64.
        num_key_value_heads: after the merge; divides the count before. With the same count nothing changes.
        rotary: the position scheme and what it leaves free.
        moment: (E', E') float64, the mean of x x^T over calibration inputs (with the constant 1 appended where
            ``heads`` have a bias column); None weighs all input directions alike.

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
    seen_by_queries, seen_by_outputs = query_metrics(heads, metric), output_metrics(heads)
    members = [slice(start, start + size) for start in range(0, heads.num_key_value_heads, size)]
    keys = [shared_key(heads.key[kv], seen_by_queries[kv], rotary, metric) for kv in members]
    values = [shared_value(heads.value[kv], seen_by_outputs[kv], rotary, metric) for kv in members]
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
    return (moment / scale + _RIDGE * eye) if scale > 0 else eye


def apply_moment(weights: Tensor, moment: Tensor | None) -> Tensor:
    """``W M``; without a moment, W."""
    return weights if moment is None else weights @ moment


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


def merge_block(heads: Tensor, metrics: Tensor, moment: Tensor | None) -> Shared:
    """The best shared d-dimensional head for n heads, each with its own invertible change of basis.

    Minimises ``sum_j || L_j (W_j - B_j W) C ||^2`` over W and all B_j, where ``L_j^T L_j`` is head j's metric and
    ``C C^T`` the moment: the top d left singular vectors P of the stacked ``L_j W_j C`` give
    ``W = sum_j P_j^T L_j W_j`` and ``B_j = L_j^-1 P_j``. P comes from the n*d x n*d Gram matrix.

    Args:
        heads: (n, d, E').
        metrics: (n, d, d), what the heads' readers see of each dimension.
        moment: (E', E') or None.
    """
    count, dim, columns = heads.shape
    root, inverse = _roots(metrics)
    stacked = (root @ heads).reshape(count * dim, columns)
    gram = apply_moment(stacked, moment) @ stacked.T
    values, vectors = torch.linalg.eigh((gram + gram.T) / 2)
    top = vectors[:, -dim:].reshape(count, dim, dim)
    shared = top.reshape(count * dim, dim).T @ stacked
    return Shared(shared, inverse @ top, values[-dim:].sum(), values.sum())


def merge_frequencies(heads: Tensor, power: Tensor, rotary: Rotary, moment: Tensor | None) -> Shared:
    """The best shared rotated head for n heads, each with its own complex factor per frequency.

    A pair of rotated dimensions is one complex number k; the score is ``Re sum_f conj(q_f) k_f e^(i theta_f delta)``.
    On average over the distance delta the frequencies do not interact, so each is one small problem: the top
    eigenvector u of the n x n Hermitian Gram matrix of ``w_j k_j C``, with ``w_j^2`` the mean ``|q|^2`` of the readers,
    gives ``k = sum_j conj(u_j) w_j k_j`` and ``b_j = u_j / w_j``.

    Args:
        heads: (n, rotary.dim, E').
        power: (n, rotary.dim / 2), the mean ``|q|^2`` of the readers per frequency.
        rotary: which dimensions are a pair.
        moment: (E', E') or None.
    """
    count, dim, _ = heads.shape
    real, imaginary = rotary.pairs()
    weight = _floored(power).sqrt().T
    stacked = torch.complex(heads[:, real], heads[:, imaginary]).transpose(0, 1) * weight[..., None]
    measured = torch.complex(apply_moment(stacked.real, moment), apply_moment(stacked.imag, moment))
    gram = measured @ stacked.mH
    values, vectors = torch.linalg.eigh((gram + gram.mH) / 2)
    top = vectors[..., -1]
    shared = (top.conj()[..., None] * stacked).sum(1)
    joined = torch.empty_like(heads[0])
    joined[real], joined[imaginary] = shared.real, shared.imag
    factors = (top / weight).T
    bases = heads.new_zeros(count, dim, dim)
    bases[:, real, real] = bases[:, imaginary, imaginary] = factors.real
    bases[:, imaginary, real], bases[:, real, imaginary] = factors.imag, -factors.imag
    return Shared(joined, bases, values[..., -1].sum() / 2, values.sum() / 2)


def _floored(power: Tensor) -> Tensor:
    """Powers (n, ...) of one group that are never zero: a head that nobody reads still gets a defined factor."""
    strongest = power.amax(0, keepdim=True)
    return torch.where(strongest > 0, torch.maximum(power, _RIDGE * strongest), torch.ones_like(power))


def _roots(metrics: Tensor) -> tuple[Tensor, Tensor]:
    """Symmetric roots, and their inverses, of the metrics (n, d, d) of one group's heads.

    Regularised relative to the group's strongest head, so that a direction that nobody reads stays invertible.
    """
    size = metrics.shape[-1]
    scale = metrics.diagonal(dim1=-2, dim2=-1).sum(-1).max() / size
    eye = torch.eye(size, dtype=metrics.dtype, device=metrics.device)
    if not scale > 0:
        ones = eye.repeat(len(metrics), 1, 1)
        return ones, ones
    values, vectors = torch.linalg.eigh(metrics / scale)
    root = ((values.clamp_min(0.0) + _RIDGE) * scale).sqrt()
    return (vectors * root[..., None, :]) @ vectors.mT, (vectors / root[..., None, :]) @ vectors.mT


def query_metrics(heads: AttentionHeads, moment: Tensor | None) -> Tensor:
    """(G, D, D): sum over the query heads of each KV head of E[q q^T]."""
    per_query = apply_moment(heads.query, moment) @ heads.query.mT
    return per_query.reshape(heads.num_key_value_heads, heads.queries_per_kv, *per_query.shape[1:]).sum(1)


def output_metrics(heads: AttentionHeads) -> Tensor:
    """(G, Dv, Dv): sum over the query heads of each KV head of W_O,h^T W_O,h."""
    per_query = heads.output @ heads.output.mT
    return per_query.reshape(heads.num_key_value_heads, heads.queries_per_kv, *per_query.shape[1:]).sum(1)


def shared_value(heads: Tensor, metrics: Tensor, rotary: Rotary, moment: Tensor | None) -> Shared:
    """One value head for the heads (n, Dv, E') of a group.

    Where nothing may be put between V and O, the least-squares one for the O that stays.
    """
    if rotary.values_free:
        return merge_block(heads, metrics, moment)
    root, _ = _roots(metrics)
    metrics = root @ root
    shared = torch.linalg.solve(metrics.sum(0), (metrics @ heads).sum(0))
    rest = heads - shared
    whole = ((metrics @ heads) * apply_moment(heads, moment)).sum()
    lost = ((metrics @ rest) * apply_moment(rest, moment)).sum()
    return Shared(shared, _eyes(heads), whole - lost, whole)


def shared_key(heads: Tensor, metrics: Tensor, rotary: Rotary, moment: Tensor | None) -> Shared:
    """One key head for the heads (n, D, E') of a group, as far as the position scheme allows.

    A sum that holds less energy than the heads had would make attention too even, so that the shared head gets the
    energy of the group back.
    """
    if rotary.keys is not KeyFreedom.ROTATION:
        return normed_key(heads, rotary, moment)
    dim = rotary.dim
    weight, bases = torch.empty_like(heads[0]), torch.zeros_like(metrics)
    kept = whole = heads.new_zeros(())
    if dim:
        real, imaginary = rotary.pairs()
        diagonal = metrics.diagonal(dim1=-2, dim2=-1)
        part = merge_frequencies(heads[:, :dim], diagonal[:, real] + diagonal[:, imaginary], rotary, moment)
        weight[:dim], bases[:, :dim, :dim] = part.weight, part.bases
        kept, whole = kept + part.kept, whole + part.whole
    if dim < heads.shape[1]:
        part = merge_block(heads[:, dim:], metrics[:, dim:, dim:], moment)
        weight[dim:], bases[:, dim:, dim:] = part.weight, part.bases
        kept, whole = kept + part.kept, whole + part.whole
    scale = torch.where(kept > 0, (whole / torch.where(kept > 0, kept, 1.0)).sqrt(), 1.0)
    return Shared(weight * scale, bases, kept, whole)


def normed_key(heads: Tensor, rotary: Rotary, moment: Tensor | None) -> Shared:
    """The mean of heads of equal energy, with the signs that agree best, at the group's energy."""
    energy = (heads * apply_moment(heads, moment)).sum((-2, -1))
    mean_energy = energy.mean()
    unit = heads * torch.where(energy > 0, energy, 1.0).rsqrt()[:, None, None]
    signs = _agreeing_signs(unit, rotary, moment) if rotary.keys is KeyFreedom.SIGN else torch.ones_like(heads[..., 0])
    shared = (signs[..., None] * unit).mean(0)
    kept = (shared * apply_moment(shared, moment)).sum()
    scale = (mean_energy / torch.where(kept > 0, kept, 1.0)).sqrt()
    return Shared(shared * scale, torch.diag_embed(signs), kept * (energy > 0).sum(), (energy > 0).sum().to(kept))


def _agreeing_signs(heads: Tensor, rotary: Rotary, moment: Tensor | None) -> Tensor:
    """(n, D) of +-1, equal within a rotary pair, such that the signed heads add up: the top eigenvector's signs."""
    measured = apply_moment(heads, moment)
    gram = measured.transpose(0, 1) @ heads.permute(1, 2, 0)
    real, imaginary = rotary.pairs()
    # One decomposition a pair, so that both its dimensions get the same sign.
    units = torch.cat([gram[real] + gram[imaginary], gram[rotary.dim :]])
    _, vectors = torch.linalg.eigh((units + units.mT) / 2)
    signs = torch.where(vectors[..., -1] * vectors[..., :1, -1] < 0, -1.0, 1.0).to(heads.dtype).T
    spread = torch.ones_like(heads[..., 0])
    pairs = len(real)
    spread[:, real] = spread[:, imaginary] = signs[:, :pairs]
    spread[:, rotary.dim :] = signs[:, pairs:]
    return spread


def _eyes(heads: Tensor) -> Tensor:
    return torch.eye(heads.shape[1], dtype=heads.dtype, device=heads.device).repeat(len(heads), 1, 1)
