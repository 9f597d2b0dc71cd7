"""The families under test: one entry for each stock class, option or layout that holds K/V heads differently.

Every model is tiny, random and float32, has 8 query heads, and is as awkward as its class allows: an explicit
head_dim that is not hidden_size / heads, biases that are not zero, norm weights that are not one, windows
shorter than the text. With 8 query heads and 4, 2 or 1 K/V heads, queries_per_kv is never the K/V-head count,
so that one cannot pass for the other.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.families.reference import (
    QUERY_HEADS,
    Layout,
    blocks,
    interleaved,
    separate,
    separate_and_norm_modules,
    separate_and_spanning_norm,
)

VOCABULARY = 80
HIDDEN = 96  # head_dim is 12 where a class derives it: neither the number of heads nor a power of two
HEAD_DIM = 16  # where a class takes it: 8 * 16 is not 96
WINDOW = 5

COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": QUERY_HEADS,
    "num_key_value_heads": QUERY_HEADS,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
BIGCODE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": HIDDEN,
    "n_inner": 56,
    "n_layer": 2,
    "n_head": QUERY_HEADS,
    "n_positions": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FALCON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "ffn_hidden_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": QUERY_HEADS,
    "max_position_embeddings": 64,
    "bias": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOWED: Mapping[str, Any] = {"sliding_window": WINDOW}
ALTERNATING: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
EXPERTS = 4

SEPARATE_TENSORS = r"\.[kv]_proj\.(weight|bias)$"
FALCON_TENSORS = r"\.query_key_value\.(weight|bias)$"
FALCON_KEYS = frozenset({"num_kv_heads", "multi_query", "new_decoder_architecture", "num_ln_in_parallel_attn"})


@dataclass(frozen=True)
class Case:
    """One stock model and what may be asked of it.

    Attributes:
        name: unique name, also the seed of its weights.
        model_type: as in ``config.json``.
        overrides: configuration beyond `base`.
        base: configuration shared by a kind of class.
        layout: where the stock module keeps its K/V heads.
        kv_heads: K/V heads of the source.
        targets: K/V heads to convert to; more than `kv_heads` means repeating heads.
        refused: targets that must be refused.
        may_change: pattern of the tensor names that hold K or V and so may differ from the source.
        config_keys: keys of ``config.json`` that may differ from the source.
        attention_layers: layers that cache keys and values, None for all.
        rewrites_queries: whether methods that rewrite whole attention modules apply.
        note: why the case is here.
    """

    name: str
    model_type: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=lambda: COMMON)
    layout: Layout = separate
    kv_heads: int = QUERY_HEADS
    targets: tuple[int, ...] = (4, 2, 1)
    refused: tuple[int, ...] = ()
    may_change: str = SEPARATE_TENSORS
    config_keys: frozenset[str] = frozenset({"num_key_value_heads"})
    attention_layers: int | None = None
    rewrites_queries: bool = True
    note: str = ""

    def build(self) -> PreTrainedModel:
        """Return the model in evaluation mode, the same on every call."""
        config = AutoConfig.for_model(self.model_type, **{**self.base, **self.overrides})
        auto: Any = AutoModelForCausalLM  # its methods are not annotated
        model: PreTrainedModel = auto.from_config(config, dtype=torch.float32).eval()
        randomise(model, seed=zlib.crc32(self.name.encode()))
        return model


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Give every parameter values of its own, so that a tensor left out or misplaced shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:  # sinusoids, which are computed anew and not stored
                continue
            if name.endswith("weight") and (parameter.dim() == 1 or "norm" in name):
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            elif name.endswith(("bias", "sinks")):
                parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() > 1:
                fan_in = 4 if parameter.shape[0] == VOCABULARY else parameter.shape[-1]
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * fan_in**-0.5)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's files, by name."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            tensors.update({name: shard.get_tensor(name) for name in shard.keys()})  # noqa: SIM118
    return tensors


CASES: tuple[Case, ...] = (
    Case("llama", "llama", {"attention_bias": True, "head_dim": HEAD_DIM}, refused=(3, 5, 6, 16)),
    Case("mistral", "mistral", {"head_dim": HEAD_DIM, **WINDOWED}),
    Case(
        "mixtral",
        "mixtral",
        {"head_dim": HEAD_DIM, "num_local_experts": EXPERTS},
        note="experts are saved one by one and loaded fused",
    ),
    Case(
        "qwen2",
        "qwen2",
        {"head_dim": HEAD_DIM, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        note="q, k and v always have a bias; head_dim is honoured though the config does not declare it",
    ),
    Case(
        "qwen2_moe",
        "qwen2_moe",
        {
            "head_dim": HEAD_DIM,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    Case(
        "qwen3",
        "qwen3",
        {"attention_bias": True, "head_dim": HEAD_DIM},
        note="k_norm of width head_dim, shared by all heads: unchanged",
    ),
    Case(
        "qwen3_moe",
        "qwen3_moe",
        {"head_dim": HEAD_DIM, "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    ),
    Case("phi", "phi", note="partial rotary; the output projection is called dense"),
    Case("phi_qk_layernorm", "phi", {"qk_layernorm": True}, note="k_layernorm of width head_dim: unchanged"),
    Case(
        "phi3",
        "phi3",
        {"head_dim": HEAD_DIM, **WINDOWED},
        layout=blocks("qkv_proj"),
        may_change=r"\.qkv_proj\.weight$",
        refused=(3,),
    ),
    Case("stablelm", "stablelm", {"partial_rotary_factor": 0.5, "use_qkv_bias": True}),
    Case(
        "stablelm_qk_layernorm",
        "stablelm",
        {"partial_rotary_factor": 0.5, "use_qkv_bias": True, "qk_layernorm": True},
        layout=separate_and_norm_modules,
        may_change=rf"{SEPARATE_TENSORS}|\.k_layernorm\.norms\.\d+\.weight$",
        note="one LayerNorm for each head: pooled over tensor names, the surplus names go",
    ),
    Case("gemma", "gemma", {"head_dim": HEAD_DIM}),
    Case("gemma2", "gemma2", {"head_dim": HEAD_DIM, "query_pre_attn_scalar": 24, **ALTERNATING}),
    Case("gemma3_text", "gemma3_text", {"head_dim": HEAD_DIM, "query_pre_attn_scalar": 24, **ALTERNATING}),
    Case("olmo", "olmo", {"head_dim": HEAD_DIM, "attention_bias": True}),
    Case(
        "olmo_clip_qkv",
        "olmo",
        {"head_dim": HEAD_DIM, "clip_qkv": 0.7},
        note="the clip acts after the pooling",
    ),
    Case(
        "olmo2",
        "olmo2",
        {"head_dim": HEAD_DIM, "attention_bias": True},
        layout=separate_and_spanning_norm,
        may_change=rf"{SEPARATE_TENSORS}|\.k_norm\.weight$",
        note="k_norm over the whole width; the RMS of repeated heads is that of the heads",
    ),
    Case(
        "olmoe",
        "olmoe",
        {"num_experts": EXPERTS, "num_experts_per_tok": 2, "clip_qkv": 0.9},
        layout=separate_and_spanning_norm,
        may_change=rf"{SEPARATE_TENSORS}|\.k_norm\.weight$",
    ),
    Case("cohere", "cohere", {"head_dim": HEAD_DIM, "logit_scale": 1.0}, note="interleaved rotary pairs"),
    Case(
        "cohere_use_qk_norm",
        "cohere",
        {"head_dim": HEAD_DIM, "logit_scale": 1.0, "use_qk_norm": True, "attention_bias": True},
        layout=separate_and_spanning_norm,
        may_change=rf"{SEPARATE_TENSORS}|\.k_norm\.weight$",
        note="k_norm weight of shape (K/V heads, head_dim)",
    ),
    Case("cohere2", "cohere2", {"num_hidden_layers": 4, "logit_scale": 1.0, **WINDOWED}, note="one NoPE layer"),
    Case("granite", "granite", {"head_dim": HEAD_DIM, "attention_bias": True, "attention_multiplier": 0.3}),
    Case(
        "granitemoe",
        "granitemoe",
        {
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "attention_multiplier": 0.3,
        },
    ),
    Case("starcoder2", "starcoder2", {"head_dim": HEAD_DIM, **WINDOWED}),
    Case("nemotron", "nemotron", {"head_dim": HEAD_DIM, "attention_bias": True}),
    Case("smollm3", "smollm3", {"head_dim": HEAD_DIM, "num_hidden_layers": 4}, note="the last layer is NoPE"),
    Case("exaone4", "exaone4", {"head_dim": HEAD_DIM, **ALTERNATING}, note="full-attention layers are NoPE"),
    Case("glm", "glm", {"head_dim": HEAD_DIM}, note="partial rotary in interleaved pairs"),
    Case("glm4", "glm4", {"head_dim": HEAD_DIM}),
    Case(
        "gpt_oss",
        "gpt_oss",
        {
            "head_dim": HEAD_DIM,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
            **WINDOWED,
        },
        note="sinks belong to query heads: unchanged",
    ),
    Case("helium", "helium", {"head_dim": 12}, note="the class wants heads * head_dim = hidden_size"),
    Case("ernie4_5", "ernie4_5", {"head_dim": HEAD_DIM, "use_bias": True}),
    Case("seed_oss", "seed_oss", {"head_dim": HEAD_DIM}),
    Case(
        "bitnet",
        "bitnet",
        {"attention_bias": True},
        note="plain float weights; attn_sub_norm is over query heads",
    ),
    Case("arcee", "arcee", {"head_dim": HEAD_DIM, "attention_bias": True}),
    Case(
        "apertus",
        "apertus",
        {
            "head_dim": HEAD_DIM,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 32,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
        note="k_norm of width head_dim",
    ),
    Case("hunyuan_v1_dense", "hunyuan_v1_dense", {"head_dim": HEAD_DIM, "attention_bias": True}),
    Case(
        "falcon_new_decoder",
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": QUERY_HEADS},
        base=FALCON,
        layout=interleaved("query_key_value"),
        may_change=FALCON_TENSORS,
        config_keys=frozenset({"num_kv_heads"}),
        refused=(3,),
    ),
    Case(
        "falcon_mha",
        "falcon",
        {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": True},
        base=FALCON,
        layout=interleaved("query_key_value"),
        may_change=FALCON_TENSORS,
        config_keys=FALCON_KEYS,
        note="one K/V head is the multi_query form, 2 and 4 the new decoder architecture with one LayerNorm",
    ),
    Case(
        "falcon_rw",
        "falcon",
        {"new_decoder_architecture": False, "multi_query": False, "parallel_attn": False, "alibi": True},
        base=FALCON,
        layout=interleaved("query_key_value"),
        targets=(1,),
        refused=(2, 4, 3),
        may_change=FALCON_TENSORS,
        config_keys=FALCON_KEYS,
        note="ALiBi; attention and MLP one after another, which the new decoder architecture does not have",
    ),
    Case(
        "falcon_multi_query",
        "falcon",
        {"new_decoder_architecture": False, "multi_query": True, "parallel_attn": True},
        base=FALCON,
        layout=blocks("query_key_value"),
        kv_heads=1,
        targets=(8,),
        may_change=FALCON_TENSORS,
        config_keys=FALCON_KEYS,
        note="one K/V head already, whatever num_kv_heads says",
    ),
    Case(
        "gpt_bigcode_mha",
        "gpt_bigcode",
        {"multi_query": False},
        base=BIGCODE,
        layout=interleaved("c_attn"),
        targets=(1,),
        refused=(2, 4, 3),
        may_change=r"\.attn\.c_attn\.(weight|bias)$",
        config_keys=frozenset({"multi_query", "num_key_value_heads"}),
        note="rows per head become blocks; the class has nothing between all heads and one",
    ),
    Case(
        "gpt_bigcode_multi_query",
        "gpt_bigcode",
        {"multi_query": True},
        base=BIGCODE,
        layout=blocks("c_attn"),
        kv_heads=1,
        targets=(8,),
        refused=(2, 4),
        may_change=r"\.attn\.c_attn\.(weight|bias)$",
        config_keys=frozenset({"multi_query", "num_key_value_heads"}),
    ),
    Case(
        "lfm2",
        "lfm2",
        {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]},
        attention_layers=1,
        note="hybrid: only the attention layer has K and V",
    ),
    Case(
        "jamba",
        "jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": EXPERTS,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
            "pad_token_id": 0,
        },
        attention_layers=2,
        note="hybrid of attention and Mamba, with experts",
    ),
    Case(
        "granitemoehybrid",
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 4,
            "mamba_d_head": 48,
            "mamba_d_state": 4,
            "mamba_n_groups": 1,
            "shared_intermediate_size": 24,
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "position_embedding_type": "rope",
        },
        attention_layers=1,
    ),
    Case(
        "qwen3_next",
        "qwen3_next",
        {
            "head_dim": HEAD_DIM,
            "num_hidden_layers": 4,
            "full_attention_interval": 2,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
        attention_layers=2,
        rewrites_queries=False,
        note="hybrid; the query projection makes a gate for each head too",
    ),
    Case(
        "dbrx",
        "dbrx",
        {
            "vocab_size": VOCABULARY,
            "d_model": HIDDEN,
            "n_heads": QUERY_HEADS,
            "n_layers": 2,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": QUERY_HEADS, "clip_qkv": 0.9, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 56, "moe_num_experts": EXPERTS, "moe_top_k": 2},
        },
        base={},
        layout=blocks("Wqkv"),
        may_change=r"\.Wqkv\.weight$",
        config_keys=frozenset({"attn_config"}),
    ),
    Case(
        "llama_gqa_source",
        "llama",
        {"attention_bias": True, "head_dim": HEAD_DIM, "num_key_value_heads": 4},
        kv_heads=4,
        targets=(2, 1, 8),
        note="a source that is grouped already: its K/V heads are grouped again, or repeated",
    ),
    Case(
        "phi3_gqa_source",
        "phi3",
        {"head_dim": HEAD_DIM, "num_key_value_heads": 4},
        layout=blocks("qkv_proj"),
        kv_heads=4,
        targets=(2, 1, 8),
        may_change=r"\.qkv_proj\.weight$",
    ),
    Case(
        "falcon_new_decoder_gqa_source",
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 4},
        base=FALCON,
        layout=interleaved("query_key_value"),
        kv_heads=4,
        targets=(2, 1, 8),
        may_change=FALCON_TENSORS,
        config_keys=frozenset({"num_kv_heads"}),
        note="the query rows move too: groups of 2 become groups of 4, 8 or 1",
    ),
)
