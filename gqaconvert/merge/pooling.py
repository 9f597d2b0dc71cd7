"""Pooling methods: one function each, from the heads of one group to one head.

A method sees a slice of n heads (n, rows, in) in float64 and returns (rows, in) in float64; it is called for the
weight of K and of V, for their biases (in = 1) and for key norms that belong to single KV heads. Rounding to the stored
type happens once, afterwards: a float32 mean of n identical heads is not exact for n = 3, 5, 6, 7, 8 and more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Role(Enum):
    """What kind of rows are pooled."""

    WEIGHT = "weight"
    BIAS = "bias"
    NORM = "norm"


@dataclass(frozen=True)
class PoolContext:
    """What a method may need besides the heads.

    Attributes:
        role: what kind of rows they are.
        double: they are stored in float64, so that float64 sums of them round.
        generator: seeded, for methods that draw.
        initializer_range: std of fresh weights.
    """

    role: Role
    double: bool
    generator: torch.Generator
    initializer_range: float


Pooling = Callable[["Tensor", PoolContext], "Tensor"]
POOLING: dict[str, Pooling] = {}


def pooling(name: str) -> Callable[[Pooling], Pooling]:
    """Register a method under a name; its docstring is its help text."""

    def register(function: Pooling) -> Pooling:
        POOLING[name] = function
        return function

    return register


@pooling("mean")
def mean(heads: Tensor, context: PoolContext) -> Tensor:
    """Mean of the group's heads (Ainslie et al., EMNLP 2023, section 2.1; the paper's best)."""
    if context.double:
        # The mean of n equal values is not exact for n = 3, 5, 6, 7 ... in their own type; this form is.
        return heads[0] + (heads - heads[0]).mean(dim=0)
    return heads.mean(dim=0)


@pooling("first")
def first(heads: Tensor, context: PoolContext) -> Tensor:  # noqa: ARG001
    """The group's first head alone (Ainslie et al., EMNLP 2023, figure 4: "First")."""
    return heads[0]


@pooling("random")
def random(heads: Tensor, context: PoolContext) -> Tensor:
    """Freshly initialised heads, for ablations (Ainslie et al., EMNLP 2023, figure 4: "Random"); needs --seed."""
    import torch

    if context.role is Role.NORM:
        return heads.mean(dim=0)
    if context.role is Role.BIAS:
        return torch.zeros_like(heads[0])
    noise = torch.randn(heads.shape[1:], generator=context.generator, dtype=torch.float64)
    return noise * context.initializer_range
