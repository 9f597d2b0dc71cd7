"""Does it compute what it should? The converted model beside the expanded reference, in float32."""

from inspect import signature
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from gqaconvert.errors import InputError
from gqaconvert.families.config import CONTEXT, LARGEST_SIZE
from gqaconvert.kvcache.dtypes import CACHE_DTYPES
from gqaconvert.kvcache.layers import AttentionCache, CacheSettings, cache_size
from gqaconvert.kvcache.models import cache_model, fitted
from gqaconvert.validation.models import expand
from gqaconvert.validation.pair import Pair
from gqaconvert.validation.types import Check, Settings, skipped, verdict

_PROMPT, _DECODED = 32, 16


def validate_logits(pair: Pair, reference: Any, model: Any, settings: Settings) -> list[Check]:  # noqa: ANN401
    """Prefill, decoding and the cache; ``reference`` is the source's model and is expanded here."""
    begun = monotonic()
    expand(reference, pair)
    vocabulary = int(model.config.get_text_config().vocab_size)
    context = pair.source.config.count(CONTEXT, LARGEST_SIZE) or _PROMPT + _DECODED
    length = min(_PROMPT + _DECODED, context)
    prompt = max(1, length * _PROMPT // (_PROMPT + _DECODED))
    ids = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = reference(ids, use_cache=False).logits[0]
        whole = model(ids, use_cache=False).logits[0]
        checks = [_agree("logits.prefill", whole, wanted, settings, f"{length} tokens at once", begun)]
        begun = monotonic()
        step = model(ids[:, :prompt], use_cache=True)
        # transformers renames it: 5.24 warns of the old name.
        argument = "cache" if _takes_cache(model) else "past_key_values"
        decoded = []
        for place in range(prompt, length):
            step = model(ids[:, place : place + 1], use_cache=True, **{argument: cache_of(step)})
            decoded.append(step.logits[0, -1])
    if decoded:
        label = f"{len(decoded)} tokens one by one, with a cache"
        checks.append(_agree("logits.decode", torch.stack(decoded), wanted[prompt:], settings, label, begun))
    return [*checks, check_cache(pair, cache_of(step), length)]


def _agree(name: str, found: Tensor, wanted: Tensor, settings: Settings, label: str, begun: float) -> Check:
    largest = float(wanted.abs().max())
    off = float((found - wanted).abs().max())
    allowed = settings.atol + settings.rtol * largest
    good = f"{label}: logits differ by {off:.2g}, {allowed:.2g} allowed (computed in float32)"
    faults = (
        [] if off <= allowed else [f"largest difference {off:.4g}, allowed {allowed:.4g}, largest logit {largest:.4g}"]
    )
    bad = f"{label}: logits are not those of the expanded reference (computed in float32)"
    seconds = monotonic() - begun
    return verdict(name, faults, good, bad, seconds=seconds, max_abs=off, allowed=allowed, largest_logit=largest)


def check_cache(pair: Pair, cache: Any, tokens: int) -> Check:  # noqa: ANN401
    """The cache that the stock class filled, against what ``estimate --runtime transformers`` says of the output."""
    name, begun = "logits.kv-cache", monotonic()
    geometry = pair.source.sites[0].geometry
    try:
        model = fitted(cache_model(pair.config), pair.kv_heads, geometry.head_dim, geometry.value_head_dim)
    except InputError as error:
        return skipped(name, f"no estimate to compare with: {error.message}")
    float32 = CACHE_DTYPES["float32"]
    settings = CacheSettings(key=float32, value=float32, runtime="transformers")
    estimate = cache_size(model, tokens, 1, settings).total
    tensors = [part for layer in cache.layers for part in (layer.keys, layer.values) if part is not None]
    measured = sum(part.numel() * part.element_size() for part in tensors)
    windows = {layer.window for layer in model.layers if isinstance(layer, AttentionCache) and layer.window}
    told = "".join(f", window {window:,}" for window in sorted(windows) if window <= tokens)
    repeated = cache_size(model.with_kv_heads(model.num_attention_heads), tokens, 1, settings).total
    if model.model_type in ("falcon", "RefinedWebModel") and measured == repeated != estimate:
        return skipped(name, "this transformers, before 5.25, repeats Falcon's KV heads before it caches them")
    good = f"{measured:,} bytes for {tokens} tokens in float32, as estimated{told}"
    faults = [f"{measured:,} bytes for {tokens} tokens in float32, estimated {estimate:,}{told}"]
    return verdict(
        name, [] if measured == estimate else faults, good, "the cache is not as large as estimated",
        seconds=monotonic() - begun, measured=measured, estimate=estimate,
    )  # fmt: skip


def _takes_cache(model: Any) -> bool:  # noqa: ANN401
    return "cache" in signature(model.forward).parameters


def cache_of(outputs: Any) -> Any:  # noqa: ANN401
    """The cache that a forward pass returned, under its new name or its old one."""
    return outputs["cache"] if "cache" in outputs else outputs["past_key_values"]
