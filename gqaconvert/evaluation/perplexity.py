"""Perplexity with the cache that a policy leaves: what a chunk predicts, it predicts from what is still there."""

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor

from gqaconvert.evaluation.subject import Subject
from gqaconvert.policies.apply import apply_policy, make_cache
from gqaconvert.policies.cache import held_bytes, measured_peak
from gqaconvert.policies.spec import KVPolicy


@torch.no_grad()
def policy_perplexity(
    subject: Subject, windows: Tensor, policy: KVPolicy, chunk: int, advance: Callable[[int], None]
) -> tuple[float, int, int, float]:
    """(perplexity, bytes held, peak bytes, tokens a second) over (B, T) tokens; bytes are of one sequence.

    The windows are read side by side, ``chunk`` tokens at once (0: all). Within a chunk every token sees what was
    stored before it and the chunk, so only 1 is faithful to a policy; with all at once nothing is evicted in time.
    """
    count, length = windows.shape
    step = chunk or length
    cache = make_cache(subject.model, policy)
    total, begun = 0.0, time.monotonic()
    with measured_peak(cache) as peak, apply_policy(subject.model, policy):
        for start in range(0, length - 1, step):
            part = windows[:, start : min(start + step, length - 1)]
            logits = subject.model(part, cache=cache, use_cache=True).logits.flatten(0, 1).float()
            targets = windows[:, start + 1 : start + 1 + part.shape[1]].flatten()
            total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum").double())
            advance(part.numel())
    seconds = time.monotonic() - begun
    tokens = windows[:, 1:].numel()
    return math.exp(min(total / tokens, 700)), held_bytes(cache) // count, peak.nbytes // count, tokens / seconds
