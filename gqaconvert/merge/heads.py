"""One attention layer as heads, and the changes of basis that leave its function as it is.

A projection's bias is one more input column, so that no merge can forget it: with a bias the input is x with a
constant 1 appended, and the projections have E' = E + 1 columns; without, E' = E.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class KeyFreedom(Enum):
    """What may be done to a key head, and undone in its query heads, without changing any score."""

    ROTATION = "rotation"
    """A complex factor per rotary pair, any invertible matrix on the dimensions that are not rotated."""
    SIGN = "sign"
    """A root-mean-square norm follows the projection: a sign per rotary pair (or dimension), and a free scale."""
    FIXED = "fixed"
    """Nothing: a norm that subtracts the mean, or a clamp, follows the projection."""


@dataclass(frozen=True)
class Rotary:
    """How positions enter the scores, and what a merge is free to do.

    Attributes:
        dim: leading dimensions of a head that are rotated; 0 for learned, relative or ALiBi positions.
        interleaved: rotary pairs are (2i, 2i + 1), as in GPT-J, GLM and Cohere; else (i, i + dim / 2), as in Llama.
        keys: the freedom of K and Q.
        values_free: any invertible matrix may be put between V and O. False where something that is not linear
            stands there (a clamp of V, a norm before the output projection).
    """

    dim: int = 0
    interleaved: bool = False
    keys: KeyFreedom = KeyFreedom.ROTATION
    values_free: bool = True

    def __post_init__(self) -> None:
        if self.dim < 0 or self.dim % 2:
            raise ValueError(f"the rotated dimensions must be an even number, not {self.dim}")

    def pairs(self) -> tuple[list[int], list[int]]:
        """Real and imaginary dimension of each rotary pair."""
        half = self.dim // 2
        if self.interleaved:
            return list(range(0, self.dim, 2)), list(range(1, self.dim, 2))
        return list(range(half)), list(range(half, self.dim))


@dataclass(frozen=True)
class AttentionHeads:
    """The projections of one attention layer, head by head.

    Query head h reads KV head h // (H / G).

    Attributes:
        query: (H, D, E').
        key: (G, D, E').
        value: (G, Dv, E').
        output: (H, Dv, E); ``output[h]`` is ``W_O[:, h * Dv : (h + 1) * Dv].T``: head h adds ``context @ output[h]``.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor

    def __post_init__(self) -> None:
        query, key, value, output = (tuple(part.shape) for part in (self.query, self.key, self.value, self.output))
        legal = (
            len(query) == len(key) == len(value) == len(output) == 3
            and query[1:] == key[1:]
            and value[0] == key[0]
            and value[2] == key[2]
            and output[:2] == (query[0], value[1])
            and key[0] > 0
            and query[0] % key[0] == 0
        )
        if not legal:
            raise ValueError(f"shapes that are no attention: query {query}, key {key}, value {value}, output {output}")

    @property
    def num_attention_heads(self) -> int:
        """H."""
        return self.query.shape[0]

    @property
    def num_key_value_heads(self) -> int:
        """G."""
        return self.key.shape[0]

    @property
    def queries_per_kv(self) -> int:
        """H / G."""
        return self.num_attention_heads // self.num_key_value_heads

    def queries_of(self, kv_head: int) -> slice:
        """The query heads that read a KV head."""
        return slice(kv_head * self.queries_per_kv, (kv_head + 1) * self.queries_per_kv)


def permute_heads(heads: AttentionHeads, order: Sequence[int]) -> AttentionHeads:
    """Put KV head ``order[p]``, with its query heads, at place p. Keeps the function unless a head's index matters.

    It matters for ALiBi slopes, relative biases and sinks, which belong to the index of the query head.

    Raises:
        ValueError: ``order`` is no permutation of the KV heads.
    """
    if sorted(order) != list(range(heads.num_key_value_heads)):
        raise ValueError(f"{list(order)} is no permutation of {heads.num_key_value_heads} KV heads")
    kv = list(order)
    queries = [query for head in kv for query in range(heads.num_attention_heads)[heads.queries_of(head)]]
    return AttentionHeads(heads.query[queries], heads.key[kv], heads.value[kv], heads.output[queries])


def change_value_basis(heads: AttentionHeads, basis: Tensor) -> AttentionHeads:
    """Write each value head in another basis, ``V -> B^-1 V`` and ``W_O -> W_O B``; keeps the function.

    Args:
        heads: of one layer, in float64.
        basis: (G, Dv, Dv), invertible.
    """
    value = basis.inverse() @ heads.value
    back = basis.transpose(-1, -2).repeat_interleave(heads.queries_per_kv, dim=0)
    return replace(heads, value=value, output=back @ heads.output)


def change_key_basis(heads: AttentionHeads, basis: Tensor) -> AttentionHeads:
    """Write each key head in another basis, ``K -> M^-1 K`` and ``Q -> M^T Q``.

    Keeps the function if nothing stands between the projections and the scores, or if M is what ``KeyFreedom`` allows.

    Args:
        heads: of one layer, in float64.
        basis: (G, D, D), invertible.
    """
    key = basis.inverse() @ heads.key
    back = basis.transpose(-1, -2).repeat_interleave(heads.queries_per_kv, dim=0)
    return replace(heads, key=key, query=back @ heads.query)
