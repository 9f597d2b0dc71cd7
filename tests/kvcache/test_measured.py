"""The real caches of tiny models in stock transformers, byte for byte, against the estimate from their saved config."""

import inspect
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from gqaconvert.families.config import ModelConfig
from gqaconvert.kvcache.dtypes import cache_dtype
from gqaconvert.kvcache.layers import AttentionCache, CacheSettings, cache_size
from gqaconvert.kvcache.models import cache_model

HEADS = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
BASE = {**HEADS, "num_hidden_layers": 4}
PLAIN = {key: value for key, value in BASE.items() if key not in ("num_key_value_heads", "head_dim")}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
T5 = {"d_model": 32, "d_kv": 12, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 3, "num_heads": 4, "vocab_size": 64,
      "decoder_start_token_id": 0}  # fmt: skip
BART = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 2,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 64,
        "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 2}  # fmt: skip
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
          "linear_conv_kernel_dim": 3}  # fmt: skip

_CACHES = ("cache", "past_key_values", "cache_params")

DECODERS: list[tuple[str, dict[str, Any]]] = [
    ("llama", BASE),
    ("llama", {**BASE, "num_key_value_heads": 1}),
    ("llama", {**BASE, "num_key_value_heads": 4, "head_dim": 10}),
    ("qwen2", {**BASE, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    ("qwen3", BASE),
    ("qwen3", {**BASE, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 3}),
    ("mistral", {**BASE, "sliding_window": 6}),
    ("mistral", {**BASE, "sliding_window": None}),
    ("mistral", BASE),
    ("mixtral", {**BASE, **EXPERTS, "sliding_window": 5}),
    ("phi3", {**BASE, "sliding_window": 7}),
    ("starcoder2", {**BASE, "sliding_window": 7}),
    ("gemma", BASE),
    ("gemma2", {**BASE, "sliding_window": 6}),
    ("gemma3_text", {**BASE, "sliding_window": 6, "num_hidden_layers": 7}),
    ("cohere", BASE),
    ("cohere2", {**BASE, "sliding_window": 6, "num_hidden_layers": 5}),
    ("olmo3", {**BASE, "sliding_window": 6, "num_hidden_layers": 5}),
    ("exaone4", {**BASE, "sliding_window": 6, "num_hidden_layers": 5}),
    ("gpt_oss", {**BASE, **EXPERTS, "sliding_window": 6}),
    ("glm4", BASE),
    ("olmo2", BASE),
    ("falcon", {**PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {**PLAIN, "new_decoder_architecture": True, "num_kv_heads": 1}),
    ("falcon", {**PLAIN, "multi_query": True}),
    ("falcon", {**PLAIN, "multi_query": False}),
    ("gpt_bigcode", {"n_embd": 32, "n_head": 4, "n_layer": 3, "vocab_size": 64, "multi_query": True}),
    ("gpt_bigcode", {"n_embd": 32, "n_head": 4, "n_layer": 3, "vocab_size": 64, "multi_query": False}),
    ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 3, "vocab_size": 64}),
    ("gpt_neox", PLAIN),
    ("opt", {**PLAIN, "ffn_dim": 32, "word_embed_proj_dim": 32}),
    ("bloom", {"hidden_size": 32, "n_head": 4, "n_layer": 3, "vocab_size": 64}),
    ("qwen3_next", {**BASE, **LINEAR, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
                    "shared_expert_intermediate_size": 8}),
    ("qwen3_5_text", {**BASE, **LINEAR}),
    ("jamba", {**{k: v for k, v in BASE.items() if k != "head_dim"}, "attn_layer_period": 3, "attn_layer_offset": 1,
               "num_experts": 1, "use_mamba_kernels": False, "mamba_d_state": 5, "mamba_dt_rank": 4}),
    ("mamba", {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 5, "vocab_size": 64}),
    ("mamba2", {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 6, "num_heads": 8, "head_dim": 8,
                "n_groups": 2, "vocab_size": 64}),
    ("deepseek_v3", {**{k: v for k, v in BASE.items() if k != "head_dim"}, "num_key_value_heads": 4, "kv_lora_rank": 12,
                     "q_lora_rank": None, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 10,
                     "first_k_dense_replace": 4}),
]  # fmt: skip


def held_bytes(cache: Any) -> int:  # noqa: ANN401
    """Bytes of all tensors that a cache holds, without knowing its classes."""
    seen: dict[int, int] = {}

    def collect(value: Any, depth: int = 0) -> None:  # noqa: ANN401
        if isinstance(value, Tensor):
            if value.is_floating_point():
                seen[id(value)] = value.numel() * value.element_size()
        elif isinstance(value, dict):
            for item in value.values():
                collect(item, depth + 1)
        elif isinstance(value, (list, tuple)):
            for item in value:
                collect(item, depth + 1)
        elif depth < 6 and type(value).__module__.startswith("transformers"):
            collect(vars(value), depth + 1)

    collect(cache)
    return sum(seen.values())


def _cache_of(output: Any) -> Any:  # noqa: ANN401
    return next(output[name] for name in _CACHES if output.get(name) is not None)


def _cache_argument(model: Any) -> str:  # noqa: ANN401
    parameters = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    return next(name for name in _CACHES if name in parameters)


def estimated(config: Any, tokens: int, batch: int, **settings: Any) -> int:  # noqa: ANN401
    kind = cache_dtype("float32")
    model = cache_model(ModelConfig.of(config.to_diff_dict() | {"model_type": config.model_type}))
    return cache_size(model, tokens, batch, CacheSettings(kind, kind, runtime="transformers", **settings)).total


@pytest.mark.parametrize(("kind", "values"), DECODERS, ids=[f"{i}-{row[0]}" for i, row in enumerate(DECODERS)])
def test_a_decoder_holds_what_is_estimated(kind: str, values: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(kind, **values)
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        output = model(torch.randint(3, 64, (2, 11)), use_cache=True)
        name = _cache_argument(model)
        # What is kept depends on the steps too: two more tokens, one at a time.
        for _ in range(2):
            output = model(torch.randint(3, 64, (2, 1)), use_cache=True, **{name: _cache_of(output)})
    cache = _cache_of(output)
    assert held_bytes(cache) == estimated(config, 13, 2)
    assert held_bytes(cache) > 0


@pytest.mark.parametrize(("kind", "values"), [("t5", T5), ("bart", BART), ("whisper", {
    **BART, "num_mel_bins": 4, "max_source_positions": 9, "max_target_positions": 40, "suppress_tokens": None,
    "begin_suppress_tokens": None})])  # fmt: skip
def test_an_encoder_decoder_holds_what_is_estimated(kind: str, values: dict[str, Any]) -> None:
    config = transformers.AutoConfig.for_model(kind, **values)
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForSpeechSeq2Seq if kind == "whisper" else transformers.AutoModelForSeq2SeqLM
    model = auto.from_config(config, dtype=torch.float32).eval()
    inputs = {"input_features": torch.randn(2, 4, 18)} if kind == "whisper" else {
        "input_ids": torch.randint(3, 64, (2, 9))}  # fmt: skip
    with torch.no_grad():
        output = model(**inputs, decoder_input_ids=torch.randint(3, 64, (2, 5)), use_cache=True)
    cache = _cache_of(output)
    assert held_bytes(cache) == estimated(config, 5, 2, encoder_tokens=9)


PATTERNS = [
    "llama", "mistral", "ministral", "mixtral", "starcoder2", "phi3", "qwen2", "qwen3", "stablelm", "gemma", "gemma2",
    "gemma3_text", "cohere", "cohere2", "exaone4", "olmo3", "smollm3", "gpt_oss", "glm", "glm4", "glm4_moe", "helium",
    "ernie4_5", "seed_oss", "bitnet", "internlm3", "phimoe", "minimax_m2", "qwen3_next", "qwen3_5_text",
    "qwen3_5_moe_text", "jamba", "qwen2_moe", "qwen3_moe", "granite", "granitemoe", "apertus", "arcee", "olmo",
    "olmo2", "olmoe", "hunyuan_v1_dense", "phi", "diffllama", "nemotron", "gemma3n_text",
]  # fmt: skip


@pytest.mark.parametrize("kind", PATTERNS)
def test_absent_keys_mean_what_the_config_class_says(kind: str) -> None:
    """KV heads, window and order of the layers of a config that says next to nothing."""
    from transformers.cache_utils import get_layer_types_and_kwargs

    given = {"num_hidden_layers": 30, "num_attention_heads": 320, "hidden_size": 3200}
    config = transformers.AutoConfig.for_model(kind, **given)
    kinds, arguments = get_layer_types_and_kwargs(config)
    heads = getattr(config, "num_key_value_heads", None) or 320
    wanted = {
        layer: (heads, more.get("sliding_window"))
        for layer, (name, more) in enumerate(zip(kinds, arguments, strict=True))
        if name not in ("dummy", "linear_attention")
    }
    model = cache_model(ModelConfig.of({"model_type": kind, **given}))
    own = [layer for layer in model.layers if isinstance(layer, AttentionCache)]
    assert {layer.layer: (layer.kv_heads, layer.window) for layer in own} == wanted
    assert {layer.key_dim for layer in own} == {getattr(config, "head_dim", None) or 10}
