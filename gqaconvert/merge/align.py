"""Merging by rotation: the heads of a group are turned towards each other, averaged, and given their norm back.

The published baseline next to the subspace merge. Only orthogonal changes of basis are used (Jin et al., "Align
Attention Heads Before Merging Them", arXiv:2412.20677: Procrustes on the heads' activations): any orthogonal matrix for
V and for dimensions of K without rotary embedding, one phase per rotary pair, as rotations must commute with RoPE.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from gqaconvert.merge.groups import MergeResult, Shared, apply_moment, merge_groups
from gqaconvert.merge.heads import AttentionHeads, KeyFreedom, Rotary
from gqaconvert.merge.subspace import normed_key

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDS = 20
"""Of generalised Procrustes: turn all heads to their mean, average again. It has settled long before."""


def merge_aligned(
    heads: AttentionHeads, num_key_value_heads: int, *, rotary: Rotary, moment: Tensor | None = None
) -> MergeResult:
    """Merge each group of consecutive KV heads into the mean of its aligned heads; see `merge_groups`.

    The explained shares are the energy of the mean before its norm is restored, over the heads' mean energy.
    """
    return merge_groups(heads, num_key_value_heads, rotary=rotary, moment=moment, solve=_solve)


def _solve(group: AttentionHeads, rotary: Rotary, moment: Tensor | None) -> tuple[Shared, Shared]:
    return _key(group.key, rotary, moment), _block(group.value, moment, turn=rotary.values_free)


def _key(heads: Tensor, rotary: Rotary, moment: Tensor | None) -> Shared:
    if rotary.keys is not KeyFreedom.ROTATION:
        return normed_key(heads, rotary, moment)
    dim = rotary.dim
    bases = torch.zeros(len(heads), heads.shape[1], heads.shape[1], dtype=heads.dtype, device=heads.device)
    if dim:
        bases[:, :dim, :dim] = _phases(heads[:, :dim], rotary, moment)
    if dim < heads.shape[1]:
        bases[:, dim:, dim:] = _rotations(heads[:, dim:], moment)
    return _mean(heads, bases, moment)


def _block(heads: Tensor, moment: Tensor | None, *, turn: bool) -> Shared:
    eye = torch.eye(heads.shape[1], dtype=heads.dtype, device=heads.device)
    return _mean(heads, _rotations(heads, moment) if turn else eye.repeat(len(heads), 1, 1), moment)


def _mean(heads: Tensor, bases: Tensor, moment: Tensor | None) -> Shared:
    """The mean of ``B_j^T W_j`` (B orthogonal), at the heads' root-mean-square norm."""
    mean = (bases.mT @ heads).mean(0)
    kept = (mean * apply_moment(mean, moment)).sum()
    whole = (heads * apply_moment(heads, moment)).sum() / len(heads)
    scale = torch.where(kept > 0, (whole / torch.where(kept > 0, kept, 1.0)).sqrt(), 1.0)
    return Shared(mean * scale, bases, kept, whole)


def _rotations(heads: Tensor, moment: Tensor | None) -> Tensor:
    """Orthogonal B (n, d, d) that bring ``B_j^T W_j`` together: Procrustes against the mean, repeated.

    Only the cross moments ``W_i M W_j^T`` (n*d x n*d) are needed.
    """
    count, dim, columns = heads.shape
    flat = heads.reshape(-1, columns)
    cross = (apply_moment(flat, moment) @ flat.T).reshape(count, dim, count, dim).transpose(1, 2)
    left, _, right = torch.linalg.svd(cross[:, 0])
    bases: Tensor = left @ right  # every head against the first
    for _ in range(_ROUNDS):
        towards_mean = torch.einsum("ijab,jbc->iac", cross, bases)
        left, _, right = torch.linalg.svd(towards_mean)
        bases = left @ right
    return bases


def _phases(heads: Tensor, rotary: Rotary, moment: Tensor | None) -> Tensor:
    """(n, dim, dim) rotations of each pair that bring the heads together."""
    real, imaginary = rotary.pairs()
    pairs = torch.complex(heads[:, real], heads[:, imaginary]).transpose(0, 1)
    measured = torch.complex(apply_moment(pairs.real, moment), apply_moment(pairs.imag, moment))
    cross = measured @ pairs.mH
    phases = _unit(cross[..., 0])
    for _ in range(_ROUNDS):
        phases = _unit((cross @ phases[..., None])[..., 0])
    factors = phases.T
    bases = heads.new_zeros(len(heads), rotary.dim, rotary.dim)
    bases[:, real, real] = bases[:, imaginary, imaginary] = factors.real
    bases[:, imaginary, real], bases[:, real, imaginary] = factors.imag, -factors.imag
    return bases


def _unit(values: Tensor) -> Tensor:
    size = values.abs()
    return torch.where(size > 0, values / torch.where(size > 0, size, 1.0), torch.ones_like(values))
