"""Greedy generation under a policy, against that of the full cache."""

from __future__ import annotations

import time
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from gqaconvert.evaluation.subject import Subject
from gqaconvert.policies.apply import apply_policy, make_cache
from gqaconvert.policies.cache import held_bytes, measured_peak
from gqaconvert.policies.spec import KVPolicy


@torch.no_grad()
def generate(
    subject: Subject, prompts: Tensor, policy: KVPolicy, chunk: int, new_tokens: int
) -> tuple[Tensor, int, int, float]:
    """(new tokens (B, N), bytes held, peak bytes, tokens a second) after prompts (B, T), by ``model.generate``."""
    cache = make_cache(subject.model, policy)
    options: dict[str, Any] = {"prefill_chunk_size": chunk} if chunk else {}
    # transformers renames it: 5.24 warns of the old name.
    takes = "cache" if "cache" in signature(subject.model.forward).parameters else "past_key_values"
    options[takes] = cache
    begun = time.monotonic()
    with measured_peak(cache) as peak, apply_policy(subject.model, policy):
        output = subject.model.generate(
            prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
            min_new_tokens=new_tokens, max_new_tokens=new_tokens, pad_token_id=0, **options,
        )  # fmt: skip
    seconds = time.monotonic() - begun
    size = len(prompts)
    new = output[:, prompts.shape[1] :]
    return new, held_bytes(cache) // size, peak.nbytes // size, output.numel() / seconds
