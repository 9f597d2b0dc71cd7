"""Attention of one layer written as its definition: loops over heads, tokens and frequencies, complex rotations."""

import cmath
import math
from collections.abc import Callable

import torch
from torch import Tensor

from gqaconvert.merge.heads import AttentionHeads, Rotary

BASE = 50.0
"""Rotary base of the tests: small, so that every frequency turns visibly within a few tokens."""


def _pair(index: int, rotary: Rotary) -> tuple[int, int]:
    return (2 * index, 2 * index + 1) if rotary.interleaved else (index, index + rotary.dim // 2)


def score(query: Tensor, key: Tensor, at: int, of: int, rotary: Rotary) -> float:
    """Scaled score of a query at position ``at`` for a key at position ``of``."""
    total = 0.0
    for frequency in range(rotary.dim // 2):
        a, b = _pair(frequency, rotary)
        theta = BASE ** (-2 * frequency / rotary.dim)
        turned_query = complex(query[a], query[b]) * cmath.exp(1j * theta * at)
        turned_key = complex(key[a], key[b]) * cmath.exp(1j * theta * of)
        total += (turned_query.conjugate() * turned_key).real
    for dim in range(rotary.dim, len(query)):
        total += float(query[dim] * key[dim])
    return total / math.sqrt(len(query))


def same(head: Tensor) -> Tensor:
    return head


def rms_norm(gain: Tensor) -> Callable[[Tensor], Tensor]:
    """A root-mean-square norm over a head, with one gain a dimension."""
    return lambda head: gain * head / math.sqrt(sum(float(x) ** 2 for x in head) / len(head))


def attention(
    heads: AttentionHeads,
    inputs: Tensor,
    rotary: Rotary,
    *,
    alibi: bool = False,
    query_norm: Callable[[Tensor], Tensor] = same,
    key_norm: Callable[[Tensor], Tensor] = same,
    value_clamp: float | None = None,
) -> Tensor:
    """Causal attention output (T, E) for inputs (T, E'), which hold the constant 1 if the heads have a bias column."""
    tokens = len(inputs)
    result = torch.zeros(tokens, heads.output.shape[2], dtype=torch.float64)
    for head in range(heads.query.shape[0]):
        kv = head * heads.key.shape[0] // heads.query.shape[0]
        queries = [query_norm(heads.query[head] @ x) for x in inputs]
        keys = [key_norm(heads.key[kv] @ x) for x in inputs]
        values = [heads.value[kv] @ x for x in inputs]
        if value_clamp is not None:
            values = [value.clamp(-value_clamp, value_clamp) for value in values]
        for t in range(tokens):
            scores = [score(queries[t], keys[s], t, s, rotary) for s in range(t + 1)]
            if alibi:
                slope = 2.0 ** (-8 * (head + 1) / heads.query.shape[0])
                scores = [value - slope * (t - s) for s, value in enumerate(scores)]
            weights = [math.exp(value - max(scores)) for value in scores]
            for s in range(t + 1):
                result[t] += weights[s] / sum(weights) * (values[s] @ heads.output[head])
    return result
