"""The subspace merge: one KV head for several, in closed form, keeping as much of the function as one head can.

V may be written in any basis if O undoes it, and K in any basis that commutes with the position scheme if Q undoes it.
So instead of averaging heads that have nothing in common, the merge looks for the d dimensions (for rotated keys: the
one complex direction per frequency) from which all heads of the group, each with its own change of basis, are best
restored. That is a principal component analysis, weighted by how much the output projection, or the queries, see. All
of it needs Gram matrices only: n x n per rotary frequency, n*d x n*d for a block, with n heads of d dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gqaconvert.merge.groups import RIDGE, MergeResult, Shared, apply_moment, merge_groups
from gqaconvert.merge.heads import AttentionHeads, KeyFreedom, Rotary


def merge_subspace(
    heads: AttentionHeads, num_key_value_heads: int, *, rotary: Rotary, moment: Tensor | None = None
) -> MergeResult:
    """Merge each group of consecutive KV heads into the one from which they are best restored; see `merge_groups`."""
    return merge_groups(heads, num_key_value_heads, rotary=rotary, moment=moment, solve=_solve)


def _solve(group: AttentionHeads, rotary: Rotary, moment: Tensor | None) -> tuple[Shared, Shared]:
    return (
        shared_key(group.key, query_metrics(group, moment), rotary, moment),
        shared_value(group.value, output_metrics(group), rotary, moment),
    )


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
    return torch.where(strongest > 0, torch.maximum(power, RIDGE * strongest), torch.ones_like(power))


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
    root = ((values.clamp_min(0.0) + RIDGE) * scale).sqrt()
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
