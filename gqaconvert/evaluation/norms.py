"""ALR: how well low key norms predict attention (Devoto et al., EMNLP 2024, section 3, equations 1 to 3)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gqaconvert.errors import UnsupportedModelError
from gqaconvert.evaluation.subject import Subject
from gqaconvert.evaluation.types import LayerNorms

_QUERIES = 8


def attention_loss(attention: Tensor, order: Tensor) -> Tensor:
    """Attention that is lost, summed over dropping 1, 2, ... n keys in an order: (...,) of (..., n) each; float64."""
    lost: Tensor = attention.double().gather(-1, order).cumsum(-1).sum(-1)
    return lost


def relative_alr(attention: Tensor, norms: Tensor) -> Tensor:
    """ALR by norm over ALR by chance, (...,) of (..., n): 0 where high norms have the least attention, 1 for chance.

    ALR is the loss of dropping the highest norms first above that of dropping the least attention first. Chance drops
    each key as often as any other: the m-th drop loses m / n of all attention, in the mean.
    """
    total = attention.double().sum(-1)
    best = attention_loss(attention, attention.argsort(dim=-1))
    chance = total * (attention.shape[-1] + 1) / 2
    mine = attention_loss(attention, norms.argsort(dim=-1, descending=True))
    return (mine - best) / (chance - best).clamp_min(1e-12)


@torch.no_grad()
def layer_norms(subject: Subject, windows: Tensor, advance: Callable[[int], None]) -> list[LayerNorms]:
    """Of every layer with a cache of keys: (B, T) tokens, asked at eight places in the second half of each window.

    Of query heads that share a KV head, the mean attention counts: they evict together.

    Raises:
        UnsupportedModelError: the class does not give its attention.
    """
    model = subject.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    length = windows.shape[1]
    places = [length // 2 + (number + 1) * (length - length // 2) // _QUERIES - 1 for number in range(_QUERIES)]
    sums: list[Tensor] = []
    try:
        for window in windows:
            outputs = model(window[None], use_cache=True, output_attentions=True)
            cache = outputs["cache"] if "cache" in outputs else outputs["past_key_values"]
            every = [getattr(layer, "keys", None) for layer in cache.layers]
            keys = [found for found in every if found is not None]
            attentions = [found for found in outputs.attentions or () if found is not None]
            if not attentions or len(attentions) != len(keys):
                raise UnsupportedModelError(f"{subject.name}: its class does not give the attention of its layers")
            found = [_one(attention[0], key[0], places) for attention, key in zip(attentions, keys, strict=True)]
            sums = [total + more for total, more in zip(sums, found, strict=True)] if sums else found
            advance(window.numel())
    finally:
        model.set_attn_implementation(before)
    return [LayerNorms(subject.name, layer, tuple((total / len(windows)).tolist())) for layer, total in enumerate(sums)]


def _one(attention: Tensor, keys: Tensor, places: list[int]) -> Tensor:
    """(G,) of attention (H, T, T) and keys (G, n, D)."""
    kv_heads, stored = keys.shape[:2]
    attention = attention[..., -stored:]  # a window keeps the newest
    shared = attention.view(kv_heads, -1, *attention.shape[1:]).mean(1)
    norms = keys.float().norm(dim=-1)
    skipped = attention.shape[1] - stored
    values = [
        relative_alr(shared[:, place, : place + 1 - skipped], norms[:, : place + 1 - skipped])
        for place in places
        if place - skipped >= 1
    ]
    return torch.stack(values).mean(0)
