"""Which layers bear fewer KV heads: one layer at a time is pooled, or its attention made constant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gqaconvert.checkpoint.headers import Transposed
from gqaconvert.errors import UnsupportedModelError
from gqaconvert.evaluation.subject import Subject
from gqaconvert.evaluation.types import LayerProbe
from gqaconvert.families import Part
from gqaconvert.families.blocks import head_blocks, source_heads
from gqaconvert.families.sites import AttentionSite

_POOLED = (Part.KEY, Part.VALUE, Part.QKV, Part.KEY_NORM)
_CONSTANT = "gqaconvert_constant"


@torch.no_grad()
def probe_layers(
    subject: Subject, windows: Tensor, kv_heads: int, advance: Callable[[int], None]
) -> tuple[float, list[LayerProbe]]:
    """(loss of the untouched model, what each layer costs) in nats a token, on the second half of (B, T) windows.

    The mean attention is taken over the first half, at this length.

    Raises:
        GqaConvertError: the count is not legal, or the class's parameters are not named as the files' tensors.
    """
    sites = subject.checkpoint.require_sites()
    geometry = sites[0].geometry
    if geometry.num_key_value_heads % kv_heads or kv_heads >= geometry.num_key_value_heads:
        raise UnsupportedModelError(
            f"{subject.name} has {geometry.num_key_value_heads} KV heads: {kv_heads} is no smaller divisor",
            hint="--kv-heads",
        )
    half = max(1, len(windows) // 2)
    text, judged = windows[:half], windows[half:] if len(windows) > 1 else windows
    baseline = _loss(subject.model, judged)
    advance(judged.numel())
    means = _mean_attention(subject, text)
    advance(text.numel())
    found = []
    for number, site in enumerate(sites):
        with pooled_layer(subject, site, kv_heads):
            pooled = _loss(subject.model, judged) - baseline
        advance(judged.numel())
        constant = None
        if means is not None and site.layer in means:
            with constant_attention(subject, site.layer, means[site.layer]):
                constant = _loss(subject.model, judged) - baseline
        advance(judged.numel())
        found.append(LayerProbe(subject.name, site.layer if site.layer >= 0 else number, pooled, constant))
    return baseline, found


@contextmanager
def pooled_layer(subject: Subject, site: AttentionSite, kv_heads: int) -> Iterator[None]:
    """Within, one layer's K and V heads are each group's mean, in the stock class with all its heads."""
    parameters = dict(subject.model.named_parameters())
    layout, geometry = subject.checkpoint.require_family().layout, site.geometry
    originals: list[tuple[Tensor, Tensor]] = []
    for tensor in site.tensors:
        if tensor.part not in _POOLED:
            continue
        place = _parameter(parameters, tensor.entry.name).data
        originals.append((place, place.clone()))
        flat = place.T if isinstance(tensor.entry, Transposed) else place.view(place.shape[0], -1)
        starts: dict[tuple[Part, int], tuple[int, int]] = {}
        row = 0
        for block in head_blocks(tensor.part, layout, geometry):
            starts[block.part, block.head] = (row, block.rows)
            row += block.rows
        scale = flat.shape[0] // row if row else 1
        if row * scale != flat.shape[0]:
            raise UnsupportedModelError(f"{tensor.entry.name} is not made of heads")
        for part in {part for part, _ in starts} - {Part.QUERY}:
            for group in range(kv_heads):
                members = list(source_heads(group, geometry.num_key_value_heads, kv_heads))
                rows = [slice(starts[part, head][0], sum(starts[part, head])) for head in members]
                mean = torch.stack([flat[place] for place in rows]).double().mean(0).to(flat.dtype)
                for each in rows:
                    flat[each] = mean
    try:
        yield
    finally:
        for place, original in originals:
            place.copy_(original)


@contextmanager
def constant_attention(subject: Subject, layer: int, matrix: Tensor) -> Iterator[None]:
    """Within, one layer attends by a given (H, T, T) matrix, whatever it reads."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = subject.model
    before = model.config._attn_implementation
    stock = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[Tensor, Tensor | None]:
        if getattr(module, "layer_idx", None) != layer:
            output: tuple[Tensor, Tensor | None] = stock(module, query, key, value, mask, **kwargs)
            return output
        values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return (matrix.to(values) @ values).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_CONSTANT, attend)
    AttentionMaskInterface.register(_CONSTANT, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    try:
        model.set_attn_implementation(_CONSTANT)
        yield
    finally:
        model.set_attn_implementation(before)


def _mean_attention(subject: Subject, windows: Tensor) -> dict[int, Tensor] | None:
    """Layer -> (H, T, T), the mean over windows; None where the class cannot be asked, or does not take another's."""
    model = subject.model
    config = model.config.get_text_config(decoder=True)
    special = getattr(config, "sliding_window", None) or getattr(config, "attn_logit_softcapping", None)
    if special or not model.get_decoder()._can_set_attn_implementation() or not model._supports_sdpa:
        return None
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    means: dict[int, Tensor] = {}
    try:
        for window in windows:
            attentions = model(window[None], use_cache=False, output_attentions=True).attentions
            if attentions is None or any(found is None for found in attentions):
                return None
            for layer, found in enumerate(attentions):
                means[layer] = means.get(layer, 0) + found[0] / len(windows)
    finally:
        model.set_attn_implementation(before)
    return means


def _loss(model: Any, windows: Tensor) -> float:  # noqa: ANN401
    """Mean loss of the next token, in nats."""
    total = 0.0
    for window in windows:
        logits = model(window[None], use_cache=False).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").double())
    return total / windows[:, 1:].numel()


def _parameter(parameters: dict[str, nn.Parameter], name: str) -> nn.Parameter:
    found = [key for key in parameters if key == name or key.endswith(f".{name}") or name.endswith(f".{key}")]
    if len(found) != 1:
        raise UnsupportedModelError(f"the stock class has no parameter {name}")
    return parameters[found[0]]
