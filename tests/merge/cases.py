"""Random layers for the merge tests, and copies of heads that a merge must undo."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gqaconvert.merge.heads import AttentionHeads, KeyFreedom, Rotary

SCHEMES = {
    "rope, half-split": Rotary(8),
    "rope, interleaved": Rotary(8, interleaved=True),
    "partial rope, half-split": Rotary(4),
    "partial rope, interleaved": Rotary(4, interleaved=True),
    "no rope": Rotary(0),
}
"""Position schemes with free keys, for heads of 8 dimensions."""


@dataclass(frozen=True)
class Shape:
    """Of a layer."""

    queries: int = 8
    kv: int = 4
    dim: int = 8
    value_dim: int = 6
    width: int = 20
    bias: bool = False


def random_heads(shape: Shape, seed: int = 0) -> AttentionHeads:
    generator = torch.Generator().manual_seed(seed)
    columns = shape.width + shape.bias

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    return AttentionHeads(
        draw(shape.queries, shape.dim, columns) * 0.4,
        draw(shape.kv, shape.dim, columns) * 0.4,
        draw(shape.kv, shape.value_dim, columns),
        draw(shape.queries, shape.value_dim, shape.width),
    )


def random_inputs(shape: Shape, tokens: int = 5, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(tokens, shape.width, generator=generator, dtype=torch.float64)
    return torch.cat([inputs, torch.ones(tokens, 1, dtype=torch.float64)], dim=1) if shape.bias else inputs


def random_moment(shape: Shape, seed: int = 2, tokens: int = 60) -> Tensor:
    """A second moment with directions of very different size."""
    inputs = random_inputs(replace(shape, bias=False), tokens, seed)
    inputs = inputs * torch.logspace(-2, 1, shape.width, dtype=torch.float64)
    if shape.bias:
        inputs = torch.cat([inputs, torch.ones(tokens, 1, dtype=torch.float64)], dim=1)
    return inputs.T @ inputs / tokens


def free_key_basis(rotary: Rotary, dim: int, count: int, seed: int = 3) -> Tensor:
    """Random matrices (count, dim, dim) that keep every score: a turn and a scale per pair, anything on the rest."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.zeros(count, dim, dim, dtype=torch.float64)
    half = rotary.dim // 2
    for head in range(count):
        for frequency in range(half):
            a, b = (2 * frequency, 2 * frequency + 1) if rotary.interleaved else (frequency, frequency + half)
            angle, scale = (
                torch.rand(2, generator=generator, dtype=torch.float64) * torch.tensor([6.28, 1.5])
            ).tolist()
            turn = torch.polar(torch.tensor(scale + 0.5, dtype=torch.float64), torch.tensor(angle, dtype=torch.float64))
            basis[head, a, a] = basis[head, b, b] = turn.real
            basis[head, b, a], basis[head, a, b] = turn.imag, -turn.imag
        rest = dim - rotary.dim
        mixed = torch.randn(rest, rest, generator=generator, dtype=torch.float64)
        basis[head, rotary.dim :, rotary.dim :] = mixed + 3 * torch.eye(rest, dtype=torch.float64)
    return basis


def planted(shape: Shape, rotary: Rotary, num_key_value_heads: int, seed: int = 4) -> AttentionHeads:
    """A layer whose KV heads are, group by group, one head in different bases: ``k_j = M_j k``, ``v_j = B_j v``.

    Queries and outputs are random: they are not what makes the heads alike.
    """
    heads = random_heads(shape, seed)
    size = shape.kv // num_key_value_heads
    keys = free_key_basis(rotary, shape.dim, shape.kv, seed + 1)
    values = free_key_basis(Rotary(0), shape.value_dim, shape.kv, seed + 2)
    first = [head - head % size for head in range(shape.kv)]
    return replace(heads, key=keys @ heads.key[first], value=values @ heads.value[first])


NORMED = {"sign": Rotary(8, keys=KeyFreedom.SIGN), "fixed": Rotary(8, keys=KeyFreedom.FIXED)}
