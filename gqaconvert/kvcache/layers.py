"""What the layers of a model keep between tokens, and how many bytes that is."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from gqaconvert.errors import InputError
from gqaconvert.kvcache.dtypes import CACHE_DTYPES, CacheDtype
from gqaconvert.policies.spec import KVPolicy

Runtime = Literal["engine", "transformers"]
"""``engine``: what serving engines have to keep. ``transformers``: what its DynamicCache holds. They differ:

a window of W tokens is W entries in an engine and W - 1 in transformers (the newest token is at hand when it is
needed), and a convolution of width k is k - 1 columns in an engine and k in transformers.
"""


def runtime_named(name: str) -> Runtime:
    """The runtime with this name.

    Raises:
        InputError: there is none.
    """
    if name == "engine":
        return "engine"
    if name == "transformers":
        return "transformers"
    raise InputError(f"no runtime {name!r}", hint="engine or transformers")


@dataclass(frozen=True)
class AttentionCache:
    """Keys and values of one self-attention layer; with ``window``, of its last tokens only."""

    layer: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None


@dataclass(frozen=True)
class LatentCache:
    """MLA: one compressed vector and one rotary key for all heads (DeepSeek-V2, section 2.1.3).

    Attributes:
        latent_dim: kv_lora_rank.
        rope_dim: qk_rope_head_dim.
        heads: attention heads, for runtimes that keep the heads instead.
        key_dim: of such a head, rotary part included.
        value_dim: of such a head.
    """

    layer: int
    latent_dim: int
    rope_dim: int
    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class CrossCache:
    """Keys and values of the encoder's output in one decoder layer: constant while decoding."""

    layer: int
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class StateCache:
    """Linear attention or SSM: a state that does not grow.

    Attributes:
        conv_channels: channels of the causal convolution whose last inputs are kept.
        conv_width: its kernel size.
        recurrent_elements: numbers of the state itself.
        splits: heads (or channels) that tensor parallelism divides.
    """

    layer: int
    conv_channels: int
    conv_width: int
    recurrent_elements: int
    splits: int


CacheLayer = AttentionCache | LatentCache | CrossCache | StateCache
KINDS: dict[type, str] = {AttentionCache: "attention", LatentCache: "latent", CrossCache: "cross", StateCache: "state"}
PARTS = ("attention", "window", "latent", "cross", "state")


@dataclass(frozen=True)
class CacheSettings:
    """How the cache is held.

    Attributes:
        key: type of keys (and latents).
        value: type of values.
        state: type of recurrent states; convolution states have the type of keys under transformers.
        tensor_parallel: devices that split the heads.
        block: tokens a block of a paged cache.
        encoder_tokens: length of the encoder's output, for cross attention.
        runtime: whose cache.
        expand_latent: MLA kept as full heads, as implementations without the absorbed form do.
        policy: what evicts entries, None for nothing.
    """

    key: CacheDtype = CACHE_DTYPES["bfloat16"]
    value: CacheDtype = CACHE_DTYPES["bfloat16"]
    state: CacheDtype = CACHE_DTYPES["float32"]
    tensor_parallel: int = 1
    block: int = 1
    encoder_tokens: int = 0
    runtime: Runtime = "engine"
    expand_latent: bool = False
    policy: KVPolicy | None = None


@dataclass(frozen=True)
class CacheModel:
    """Everything about a model that decides its cache.

    Attributes:
        model_type: of config.json.
        num_attention_heads: query heads.
        num_key_value_heads: of the (first) attention layers, None where there are none.
        num_hidden_layers: decoder layers.
        layers: what they keep; a layer may have several entries (self and cross attention), or none.
        pattern: where the order of the layer kinds is from, for people.
        context: the longest sequence that the model was made for, None if the config does not say.
        encoder_tokens: the encoder's longest output, None if there is no encoder or no limit.
    """

    model_type: str
    num_attention_heads: int
    num_key_value_heads: int | None
    num_hidden_layers: int
    layers: tuple[CacheLayer, ...]
    pattern: str
    context: int | None = None
    encoder_tokens: int | None = None

    def with_kv_heads(self, count: int) -> "CacheModel":
        """The same model with another number of KV heads in all its self-attention layers."""
        layers = tuple(
            replace(layer, kv_heads=count) if isinstance(layer, AttentionCache) else layer for layer in self.layers
        )
        return replace(self, num_key_value_heads=count, layers=layers)


@dataclass(frozen=True)
class CacheSize:
    """Bytes of a cache.

    Attributes:
        parts: kind (`PARTS`) -> bytes, summed over all devices.
        per_device: bytes on each device (all the same).
        prefill_peak: bytes over all devices at the worst moment of a prefill that evicts layer by layer.
    """

    parts: Mapping[str, int]
    per_device: int
    prefill_peak: int

    @property
    def total(self) -> int:
        """Bytes summed over all devices."""
        return sum(self.parts.values())


def cache_size(model: CacheModel, tokens: int, batch: int, settings: CacheSettings) -> CacheSize:
    """Bytes that ``batch`` sequences of ``tokens`` tokens keep.

    Under tensor parallelism every device holds max(1, KV heads / devices) heads (as vLLM does), so beyond the number
    of KV heads the sum grows; a latent cache is whole on every device.

    Raises:
        InputError: heads cannot be divided over the devices, or heads do not fit the type's blocks.
    """
    if settings.tensor_parallel < 1 or (model.num_attention_heads % settings.tensor_parallel):
        raise InputError(
            f"{model.num_attention_heads} attention heads cannot be split over {settings.tensor_parallel} devices"
        )
    parts = dict.fromkeys(PARTS, 0)
    growth = 0
    for layer in model.layers:
        kind, held, unevicted = _layer_bytes(layer, tokens, settings)
        parts[kind] += held * batch * settings.tensor_parallel
        growth = max(growth, (unevicted - held) * batch * settings.tensor_parallel)
    total = sum(parts.values())
    return CacheSize(parts, total // settings.tensor_parallel, total + growth)


def _layer_bytes(layer: CacheLayer, tokens: int, settings: CacheSettings) -> tuple[str, int, int]:
    """Kind, bytes for one sequence on one device, and the same without eviction."""
    devices = settings.tensor_parallel
    match layer:
        case AttentionCache():
            token = _shard(layer.kv_heads, devices) * _pair(layer.key_dim, layer.value_dim, settings)
            if layer.window is not None:
                # transformers cuts to [-window + 1:], which keeps everything if the window is 1.
                window = layer.window - 1 if settings.runtime == "transformers" else layer.window
                held = _paged(min(tokens, window) if window else tokens, settings) * token
                return "window", held, held
            kept = settings.policy.entries(layer.layer, tokens) if settings.policy else tokens
            return "attention", _paged(kept, settings) * token, _paged(tokens, settings) * token
        case LatentCache():
            if settings.policy:
                raise InputError("cache policies are not defined for latent attention (MLA)")
            if settings.expand_latent:
                token = _shard(layer.heads, devices) * _pair(layer.key_dim, layer.value_dim, settings)
            else:
                token = settings.key.vector(layer.latent_dim) + settings.key.vector(layer.rope_dim)
            held = _paged(tokens, settings) * token
            return "latent", held, held
        case CrossCache():
            token = _shard(layer.kv_heads, devices) * _pair(layer.key_dim, layer.value_dim, settings)
            held = _paged(settings.encoder_tokens, settings) * token
            return "cross", held, held
        case StateCache():
            if layer.splits % devices:
                raise InputError(f"a state of {layer.splits} heads cannot be split over {devices} devices")
            columns = layer.conv_width if settings.runtime == "transformers" else layer.conv_width - 1
            # transformers keeps the convolution's inputs in the model's type; nobody quantises states.
            native = settings.runtime == "transformers" and settings.key.bits >= 16
            conv = settings.key if native else settings.state
            held = conv.vector(layer.conv_channels * columns // devices)
            held += settings.state.vector(layer.recurrent_elements // devices)
            return "state", held, held


def _shard(heads: int, devices: int) -> int:
    if heads % devices and devices % heads:
        raise InputError(
            f"{heads} KV heads cannot be split over {devices} devices", hint="one must be a multiple of the other"
        )
    return max(1, heads // devices)


def _pair(key_dim: int, value_dim: int, settings: CacheSettings) -> int:
    return settings.key.vector(key_dim) + settings.value.vector(value_dim)


def _paged(tokens: int, settings: CacheSettings) -> int:
    return -(-tokens // settings.block) * settings.block


def summary(model: CacheModel) -> Iterator[tuple[str, int]]:
    """Kinds of layers, and how many there are of each, for people and JSON."""
    counts: dict[str, int] = {}
    for layer in model.layers:
        windowed = isinstance(layer, AttentionCache) and layer.window is not None
        kind = "window" if windowed else KINDS[type(layer)]
        counts[kind] = counts.get(kind, 0) + 1
    yield from counts.items()
