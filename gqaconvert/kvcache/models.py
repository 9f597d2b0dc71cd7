"""From config.json to what a model caches. What is not known here is refused: a wrong size is worse than none.

The defaults of absent keys and the orders of layer kinds are those of the config classes of transformers 5.25; tests
compare them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gqaconvert.errors import CheckpointError, UnsupportedModelError
from gqaconvert.families.config import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, ModelConfig, whole_number
from gqaconvert.kvcache.layers import AttentionCache, CacheLayer, CacheModel, CrossCache, LatentCache, StateCache

_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions")
_KINDS = ("full_attention", "sliding_attention", "linear_attention")
# Keys that change what is cached, and the rules that read them; anywhere else they are a reason to refuse.
_TELLING = (
    "kv_lora_rank", "num_kv_shared_layers", "attention_chunk_size", "index_head_dim", "index_topk",
    "layers_block_type", "hybrid_override_pattern", "mamba_d_state", "ssm_state_size", "state_size",
    "linear_num_value_heads", "full_attention_interval", "attn_layer_period", "sliding_window_pattern",
    "cross_attention_layers", "global_head_dim", "num_global_key_value_heads", "swa_head_dim",
    "swa_num_key_value_heads", "attention_value_scale", "per_layer_config", "compress_ratios", "block_configs",
    "cla_share_factor",
)  # fmt: skip


@dataclass(frozen=True)
class _Rule:
    """How model types read their config.

    Attributes:
        kv_heads: their KV heads if no key says, None for the number of query heads.
        head_dim: their head_dim if no key says, None for hidden size / heads.
        window: their sliding window if no key says, None for none, -1 where the type knows no such key.
        pattern: "none"; "all" layers have the window; "gated" (Qwen: use_sliding_window and max_window_layers); or
            the distance of layers without a window.
        reads: telling keys that this rule understands.
    """

    kv_heads: int | None = None
    head_dim: int | None = None
    window: int | None = -1
    pattern: str | int = "none"
    reads: tuple[str, ...] = ()


_PLAIN = _Rule()
_RULES: dict[str, _Rule] = {
    **dict.fromkeys(
        (
            "llama",
            "phi",
            "olmo",
            "olmo2",
            "olmoe",
            "cohere",
            "granite",
            "granitemoe",
            "nemotron",
            "arcee",
            "apertus",
            "hunyuan_v1_dense",
            "diffllama",
            "gpt_neox",
            "gptj",
            "codegen",
            "gpt2",
            "opt",
            "bloom",
            "mpt",
            "persimmon",
            "falcon",
            "RefinedWebModel",
            "gpt_bigcode",
        ),
        _PLAIN,
    ),
    "mistral": _Rule(8, None, 4096, "all"),
    "ministral": _Rule(8, None, 4096, "all"),
    "mixtral": _Rule(8, None, None, "all"),
    "starcoder2": _Rule(2, None, None, "all"),
    "phi3": _Rule(None, None, None, "all"),
    "qwen2": _Rule(32, None, 4096, "gated"),
    "qwen3": _Rule(32, 128, 4096, "gated"),
    "qwen2_moe": _Rule(16, None, 4096, "gated"),
    "qwen3_moe": _Rule(4, None, 4096, "gated"),
    "stablelm": _Rule(32),
    "gemma": _Rule(16, 256),
    "gemma2": _Rule(4, 256, 4096, 2),
    "gemma3_text": _Rule(4, 256, 4096, 6, ("sliding_window_pattern",)),
    "gemma3n_text": _Rule(2, 256, 512, 5, ("num_kv_shared_layers",)),
    "cohere2": _Rule(None, None, 4096, 4, ("sliding_window_pattern",)),
    "exaone4": _Rule(32, None, 4096, 4, ("sliding_window_pattern",)),
    "olmo3": _Rule(None, None, 4096, 4),
    "smollm3": _Rule(4, None, None, "gated"),
    "gpt_oss": _Rule(8, 64, 128, 2),
    "glm": _Rule(2, 128),
    "glm4": _Rule(2, 128),
    "glm4_moe": _Rule(8),
    "helium": _Rule(20, 128),
    "ernie4_5": _Rule(2, 128),
    "seed_oss": _Rule(8, 128),
    "bitnet": _Rule(5),
    "internlm3": _Rule(2, 128),
    "phimoe": _Rule(8, None, None, "all"),
    "minimax_m2": _Rule(8, 128),
    "qwen3_next": _Rule(2, 256, reads=("linear_num_value_heads", "full_attention_interval")),
    "qwen3_5_text": _Rule(4, 256, reads=("linear_num_value_heads", "full_attention_interval")),
    "qwen3_5_moe_text": _Rule(2, 256, reads=("linear_num_value_heads", "full_attention_interval")),
    "jamba": _Rule(8, None, reads=("mamba_d_state", "attn_layer_period", "layers_block_type")),
    "mamba": _Rule(reads=("state_size",)),
    "falcon_mamba": _Rule(reads=("state_size",)),
    "mamba2": _Rule(reads=("state_size",)),
    "deepseek_v2": _Rule(reads=("kv_lora_rank",)),
    "deepseek_v3": _Rule(reads=("kv_lora_rank",)),
    "minicpm3": _Rule(reads=("kv_lora_rank",)),
}
_WRAPPED = {"gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "qwen3_5": "qwen3_5_text",
            "qwen3_5_moe": "qwen3_5_moe_text"}  # fmt: skip
_ENCODER_DECODER = ("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "whisper", "m2m_100")


def cache_model(config: ModelConfig) -> CacheModel:
    """What the model caches, from its config alone.

    Raises:
        UnsupportedModelError: its kind of cache is not known here.
        CheckpointError: the config lacks numbers, or contradicts itself.
    """
    kind = _WRAPPED.get(config.model_type, config.model_type)
    if kind in _ENCODER_DECODER:
        return _encoder_decoder(config)
    rule = _RULES.get(kind)
    if rule is None:
        raise UnsupportedModelError(
            f"model_type {kind!r}: what it caches is not known here, and a guess could be wrong by a large factor",
            hint="kinds of cache that are known: README, 'estimate'",
        )
    for key in _TELLING:
        if config.text.get(key) and key not in rule.reads:
            raise UnsupportedModelError(
                f"config.json has {key}, which model_type {kind!r} does not have in stock transformers; "
                "its cache could differ, so it is not estimated"
            )
    if kind.endswith("mamba") or kind == "mamba2":
        return _pure_state(config, kind)
    layers = _need(config, LAYERS, "number of layers")
    heads = _need(config, HEADS, "number of attention heads")
    if "kv_lora_rank" in rule.reads:
        return _latent(config, layers, heads)
    return _decoder(config, kind, rule, layers, heads)


def _decoder(config: ModelConfig, kind: str, rule: _Rule, layers: int, heads: int) -> CacheModel:
    kv_heads = _kv_heads(config, kind, rule, heads)
    if heads % kv_heads:
        raise CheckpointError(f"config.json: {heads} attention heads are no multiple of {kv_heads} KV heads")
    head_dim = config.count(HEAD_DIM) or rule.head_dim or _need(config, HIDDEN, "hidden size") // heads
    kinds, pattern = _layer_kinds(config, kind, rule, layers)
    window = _window(config, rule)
    held: list[CacheLayer] = []
    for layer, name in enumerate(kinds):
        if name == "linear_attention":
            held.append(_state(config, kind, layer))
        elif name == "sliding_attention":
            if window is None:
                raise CheckpointError("config.json names sliding-window layers, and no sliding_window")
            held.append(AttentionCache(layer, kv_heads, head_dim, head_dim, window))
        else:
            held.append(AttentionCache(layer, kv_heads, head_dim, head_dim))
    if "num_kv_shared_layers" in rule.reads:
        own = layers - _integer(config.text, "num_kv_shared_layers", 15)
        held = held[: max(own, 0)]
        pattern += f"; the last {layers - own} layers share the KV of earlier ones"
    return CacheModel(
        config.model_type, heads, kv_heads, layers, tuple(held), pattern, _context(config, _CONTEXT),
    )  # fmt: skip


def _kv_heads(config: ModelConfig, kind: str, rule: _Rule, heads: int) -> int:
    text = config.text
    if kind == "gpt_bigcode":
        return 1 if text.get("multi_query", True) else heads
    if kind in ("falcon", "RefinedWebModel"):
        if text.get("multi_query", True) and not text.get("new_decoder_architecture", False):
            return 1
        return config.count(("num_kv_heads", "n_head_kv")) or heads
    if "num_key_value_heads" in text and text["num_key_value_heads"] is None:
        return heads
    return config.count(KV_HEADS) or rule.kv_heads or heads


def _layer_kinds(config: ModelConfig, kind: str, rule: _Rule, layers: int) -> tuple[list[str], str]:
    """One kind a layer, and where that is from."""
    declared = config.text.get("layer_types")
    if kind == "jamba":
        period, offset = _integer(config.text, "attn_layer_period", 8), _integer(config.text, "attn_layer_offset", 4)
        return [_KINDS[0] if i % period == offset else _KINDS[2] for i in range(layers)], "attn_layer_period"
    if declared is not None:
        if not isinstance(declared, list) or len(declared) != layers:
            raise CheckpointError(f"config.json: layer_types is no list of {layers} kinds")
        allowed = _KINDS if "linear_num_value_heads" in rule.reads else _KINDS[:2]
        for name in declared:
            if name not in allowed:
                raise UnsupportedModelError(f"layer_types has {str(name)[:60]!r}, a cache that is not known here")
        return declared, "layer_types"
    if "full_attention_interval" in rule.reads:
        interval = _integer(config.text, "full_attention_interval", 4)
        return [_KINDS[2] if (i + 1) % interval else _KINDS[0] for i in range(layers)], "full_attention_interval"
    return _window_kinds(config, kind, rule, layers)


def _window_kinds(config: ModelConfig, kind: str, rule: _Rule, layers: int) -> tuple[list[str], str]:
    full, sliding = [_KINDS[0]] * layers, [_KINDS[1]] * layers
    window = _window(config, rule)
    if rule.pattern == "none":
        if config.text.get("sliding_window"):
            raise UnsupportedModelError(
                f"config.json has a sliding_window and no layer_types, and model_type {kind!r} has no rule for it"
            )
        return full, "all layers alike"
    if window is None:
        return full, "no sliding window"
    if rule.pattern == "all":
        return sliding, f"every layer has the window ({kind})"
    if rule.pattern == "gated":
        if not config.text.get("use_sliding_window", False):
            return full, "use_sliding_window is off"
        if kind not in ("qwen2", "qwen3"):
            raise UnsupportedModelError(f"{kind} with use_sliding_window and without layer_types: order not known here")
        first = _integer(config.text, "max_window_layers", 28)
        return full[:first] + sliding[first:], "max_window_layers"
    step = config.text.get("sliding_window_pattern") if "sliding_window_pattern" in rule.reads else None
    if isinstance(step, str):
        step = len(step)
    step = rule.pattern if step is None else step
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        raise CheckpointError(f"config.json: sliding_window_pattern is {str(step)[:60]}")
    kinds = [_KINDS[1] if (i + 1) % step else _KINDS[0] for i in range(layers)]
    return kinds, f"every {step}th layer is full ({kind}'s rule, layer_types is absent)"


def _window(config: ModelConfig, rule: _Rule) -> int | None:
    value = config.text.get("sliding_window", rule.window if rule.window != -1 else None)
    # Qwen3-MoE and others write 0 for none.
    return _integer({"sliding_window": value}, "sliding_window", None) or None if value is not None else None


def _state(config: ModelConfig, kind: str, layer: int) -> StateCache:
    text = config.text
    if kind == "jamba":
        channels = _integer(text, "mamba_expand", 2) * _need(config, HIDDEN, "hidden size")
        width, state = _integer(text, "mamba_d_conv", 4), _integer(text, "mamba_d_state", 16)
        return StateCache(layer, channels, width, channels * state, channels)
    keys, values = _integer(text, "linear_num_key_heads", 16), _integer(text, "linear_num_value_heads", 32)
    key_dim, value_dim = _integer(text, "linear_key_head_dim", 128), _integer(text, "linear_value_head_dim", 128)
    channels = 2 * keys * key_dim + values * value_dim
    width = _integer(text, "linear_conv_kernel_dim", 4)
    return StateCache(layer, channels, width, values * key_dim * value_dim, keys)


def _pure_state(config: ModelConfig, kind: str) -> CacheModel:
    text, layers = config.text, _need(config, LAYERS, "number of layers")
    channels = _integer(text, "expand", 2) * _need(config, HIDDEN, "hidden size")
    width = _integer(text, "conv_kernel", 4)
    if kind == "mamba2":
        state, heads = _integer(text, "state_size", 128), _integer(text, "num_heads", 128)
        held = [
            StateCache(i, channels + 2 * _integer(text, "n_groups", 8) * state, width, channels * state, heads)
            for i in range(layers)
        ]
    else:
        channels = text.get("intermediate_size") or channels
        heads = channels
        held = [
            StateCache(i, channels, width, channels * _integer(text, "state_size", 16), heads) for i in range(layers)
        ]
    return CacheModel(config.model_type, heads, None, layers, tuple(held), "no attention: states only")


def _latent(config: ModelConfig, layers: int, heads: int) -> CacheModel:
    text = config.text
    rank, rope = _integer(text, "kv_lora_rank", None), _integer(text, "qk_rope_head_dim", None)
    key, value = _integer(text, "qk_nope_head_dim", None) + rope, _integer(text, "v_head_dim", None)
    held = tuple(LatentCache(layer, rank, rope, heads, key, value) for layer in range(layers))
    return CacheModel(config.model_type, heads, None, layers, held, "MLA in every layer", _context(config, _CONTEXT))


def _encoder_decoder(config: ModelConfig) -> CacheModel:
    text = config.text
    if config.model_type in ("t5", "mt5", "umt5"):
        layers = config.count(("num_decoder_layers",)) or _need(config, ("num_layers",), "number of decoder layers")
        heads = _need(config, ("num_heads",), "number of heads")
        dim = _integer(text, "d_kv", 64)
    else:
        layers = _need(config, ("decoder_layers",), "number of decoder layers")
        heads = _need(config, ("decoder_attention_heads",), "number of decoder heads")
        dim = _need(config, ("d_model",), "hidden size") // heads
    kv_heads = config.count(KV_HEADS) or heads
    held: list[CacheLayer] = []
    for layer in range(layers):
        held += [AttentionCache(layer, kv_heads, dim, dim), CrossCache(layer, kv_heads, dim, dim)]
    encoder = _context(config, ("max_source_positions", "max_position_embeddings", "n_positions"))
    return CacheModel(
        config.model_type, heads, kv_heads, layers, tuple(held), "self and cross attention in every decoder layer",
        _context(config, ("max_target_positions", "max_position_embeddings")), encoder,
    )  # fmt: skip


def fitted(model: CacheModel, kv_heads: int, head_dim: int, value_dim: int) -> CacheModel:
    """The model with the heads that its weights have, which outrank the config's defaults."""
    layers = tuple(
        replace(layer, kv_heads=kv_heads, key_dim=head_dim, value_dim=value_dim)
        if isinstance(layer, (AttentionCache, CrossCache))
        else layer
        for layer in model.layers
    )
    return replace(model, num_key_value_heads=kv_heads, layers=layers)


def _context(config: ModelConfig, names: tuple[str, ...]) -> int | None:
    """A length under the first of ``names``; it only limits and warns, so nonsense counts as absent."""
    values = (config.text.get(name) for name in names)
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _need(config: ModelConfig, names: tuple[str, ...], what: str) -> int:
    found = config.count(names)
    if found is None:
        raise CheckpointError(f"config.json has no {what} ({', '.join(names[:2])})")
    return found


def _integer(text: Mapping[str, Any], name: str, default: int | None) -> int:
    return whole_number(name, text.get(name, default), 0, 2**24)
