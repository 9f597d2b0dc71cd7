"""Run a transformers model under a cache policy. Needs transformers.

    with apply_policy(model, KVPolicy.parse("tova:512")):
        model.generate(**inputs)

Eviction loses what it evicts. Inside the block the model's attention function is `gqaconvert.policies.attention`'s and
a hook on its decoder gives every new cache the policy's layers; both are gone afterwards. All state is in the cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from gqaconvert.errors import InputError, MissingExtraError, UnsupportedModelError
from gqaconvert.policies.spec import KVPolicy

try:
    from transformers import DynamicCache, PreTrainedModel
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
except ImportError:
    raise MissingExtraError("transformers", "transformers") from None

from gqaconvert.policies.attention import PREFIX, register
from gqaconvert.policies.cache import EvictLayer, begin_pass

_CACHE_NAMES = ("cache", "past_key_values")
"""Of the decoder's argument; transformers renamed it."""


@dataclass(frozen=True)
class Applied:
    """What a policy does to one model.

    Attributes:
        policy: which.
        layers: numbers of the layers that evict; none for the policy that keeps everything, which works for any model.
        left_alone: number of each other layer -> why it keeps what it has.
    """

    policy: KVPolicy
    layers: tuple[int, ...]
    left_alone: Mapping[int, str]


@contextmanager
def apply_policy(model: Any, policy: KVPolicy) -> Iterator[Applied]:  # noqa: ANN401
    """Inside the block, ``model`` evicts by ``policy``: caches that it or ``generate`` makes, or one of `make_cache`.

    A forward pass sees all entries that were stored before it and its own tokens; then each layer evicts, right after
    its own attention. So a prompt in one piece is read in full, and one in chunks (``prefill_chunk_size``) is not.

    Raises:
        UnsupportedModelError: the model's caches or attention cannot work so, and why.
        InputError: a layer to skip that does not exist, a model that is under a policy already; inside the block:
            no cache, a cache of another kind or policy, one that is in use, padding on the right, and whatever needs
            to crop the cache.
    """
    decoder, applied = _admitted(model, policy)
    if not applied.layers:
        yield applied
        return
    before = decoder.config._attn_implementation
    if before.startswith(PREFIX):
        raise InputError("the model is under a cache policy already")
    name = _cache_name(decoder)

    def admit(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        begin_pass()
        given = next((key for key in _CACHE_NAMES if kwargs.get(key) is not None), None)
        if given is None:
            asked = kwargs.get("use_cache")
            if not (decoder.config.use_cache if asked is None else asked):
                raise InputError(f"policy {policy}: without a cache (use_cache=False) there is nothing to evict")
            return args, kwargs | {name: _new(decoder, applied)}
        _take_over(kwargs[given], decoder, applied)
        return args, kwargs

    handle = decoder.register_forward_pre_hook(admit, with_kwargs=True)
    try:
        decoder.set_attn_implementation(register(before))
        yield applied
    finally:
        handle.remove()
        decoder.set_attn_implementation(before)


def make_cache(model: Any, policy: KVPolicy) -> DynamicCache:  # noqa: ANN401
    """An empty cache for ``model`` under ``policy``, to be used inside `apply_policy`.

    Raises:
        UnsupportedModelError: as `apply_policy`.
        InputError: as `apply_policy`.
    """
    decoder, applied = _admitted(model, policy)
    return _new(decoder, applied)


def _new(decoder: Any, applied: Applied) -> DynamicCache:  # noqa: ANN401
    cache = DynamicCache(config=decoder.config)
    for number in applied.layers:
        cache.layers[number] = EvictLayer(applied.policy, number)
    return cache


def _take_over(cache: Any, decoder: Any, applied: Applied) -> None:  # noqa: ANN401
    """Give an empty stock cache the policy's layers, in place: ``generate`` holds on to the object.

    Raises:
        InputError: the cache is of another kind or policy, or holds tokens already.
    """
    policies = {layer.policy for layer in getattr(cache, "layers", ()) if isinstance(layer, EvictLayer)}
    if policies == {applied.policy}:
        return
    if policies:
        raise InputError(f"the cache is under {policies.pop()}, the model under {applied.policy}")
    if type(cache) is not DynamicCache or cache.offloading:
        kind = "an offloaded cache" if getattr(cache, "offloading", False) else type(cache).__name__
        raise InputError(
            f"policy {applied.policy}: {kind} cannot evict", hint="leave cache_implementation at its default"
        )
    if cache.get_seq_length():
        raise InputError(
            f"policy {applied.policy}: the cache holds {cache.get_seq_length()} tokens without a policy already",
            hint="make_cache(model, policy) gives one that can be filled in pieces",
        )
    cache.layers = _new(decoder, applied).layers
    cache.layer_class_to_replicate = None


def _cache_name(decoder: Any) -> str:  # noqa: ANN401
    parameters = inspect.signature(inspect.unwrap(type(decoder).forward)).parameters
    found = next((name for name in _CACHE_NAMES if name in parameters), None)
    if found is None:
        raise UnsupportedModelError(f"{type(decoder).__name__} takes no key-value cache")
    return found


def _admitted(model: Any, policy: KVPolicy) -> tuple[Any, Applied]:  # noqa: ANN401
    """The decoder, and which of its layers evict.

    Raises:
        UnsupportedModelError: why it cannot.
        InputError: the policy names a layer that is not there.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} is no transformers model", hint="give the model itself, not compiled or wrapped"
        )
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    decoder: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    if policy.kind == "full":
        return decoder, Applied(policy, (), {})
    if model.config.is_encoder_decoder or decoder is None:
        raise UnsupportedModelError(f"{name}: cache policies are for decoder-only models")
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(f"{name}: cache policies are not defined for latent attention (MLA)")
    if getattr(config, "num_kv_shared_layers", None) or getattr(config, "kv_sharing_modes", None):
        raise UnsupportedModelError(f"{name}: layers share keys and values, so what one evicts another would miss")
    if not decoder._can_set_attn_implementation():
        raise UnsupportedModelError(f"{name} computes attention in code of its own, where a policy cannot decide")
    if getattr(config, "alibi", False):
        raise UnsupportedModelError(
            f"{name}: its position biases (ALiBi) differ between heads, a policy's mask does not"
        )
    layers = DynamicCache(config=config).layers
    if any(number >= len(layers) for number in policy.skip_layers):
        raise InputError(f"policy {policy}: the model has only {len(layers)} layers")
    left_alone = {number: why for number, layer in enumerate(layers) if (why := _reason(layer, number, policy))}
    evicting = tuple(number for number in range(len(layers)) if number not in left_alone)
    if not evicting:
        reasons = ", ".join(sorted(set(left_alone.values())))
        raise UnsupportedModelError(f"{name}: policy {policy} has no layer to evict from ({reasons})")
    return decoder, Applied(policy, evicting, left_alone)


def _reason(layer: Any, number: int, policy: KVPolicy) -> str | None:  # noqa: ANN401
    """Why a layer is left alone."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        return "sliding window"
    if type(layer) is not DynamicLayer:
        return type(layer).__name__
    return "skipped" if number in policy.skip_layers else None
