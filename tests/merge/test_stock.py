"""The merge against stock transformers attention: Llama (half-split), GLM (partial, interleaved), GPT-J (likewise)."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GlmConfig, GPTJConfig, LlamaConfig
from transformers.models.glm.modeling_glm import GlmForCausalLM
from transformers.models.gptj.modeling_gptj import GPTJForCausalLM
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from gqaconvert.merge.heads import AttentionHeads, Rotary
from gqaconvert.merge.subspace import merge_subspace
from tests.merge.cases import free_key_basis

HEADS, DIM, WIDTH = 4, 16, 64
TOKENS = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(0))
COMMON: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}


def _llama(kv: int) -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**COMMON, num_key_value_heads=kv, attention_bias=True))


def _glm(kv: int) -> nn.Module:
    return GlmForCausalLM(
        GlmConfig(**{**COMMON, "partial_rotary_factor": 0.5}, num_key_value_heads=kv, attention_bias=True)
    )


def _gptj(kv: int) -> nn.Module:
    settings: dict[str, Any] = {
        "n_positions": 64,
        "n_embd": WIDTH,
        "n_layer": 2,
        "n_head": HEADS,
        "rotary_dim": 8,
        "vocab_size": 50,
    }
    return GPTJForCausalLM(GPTJConfig(**settings))


MODELS = {
    "llama": (_llama, Rotary(16)),
    "glm": (_glm, Rotary(8, interleaved=True)),
    "gptj": (_gptj, Rotary(8, interleaved=True)),
}


def _randomise(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model.double().eval()


def _attentions(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "q_proj")]


def _read(attention: nn.Module) -> AttentionHeads:
    def rows(projection: nn.Linear) -> Tensor:
        weight = projection.weight
        if projection.bias is not None:
            weight = torch.cat([weight, projection.bias[:, None]], dim=1)
        return weight.reshape(-1, DIM, weight.shape[1])

    parts: Any = attention
    output = (parts.o_proj if hasattr(parts, "o_proj") else parts.out_proj).weight
    return AttentionHeads(rows(parts.q_proj), rows(parts.k_proj), rows(parts.v_proj), output.T.reshape(-1, DIM, WIDTH))


def _write(attention: nn.Module, heads: AttentionHeads) -> None:
    parts: Any = attention
    output = parts.o_proj if hasattr(parts, "o_proj") else parts.out_proj
    with torch.no_grad():
        for projection, part in ((parts.q_proj, heads.query), (parts.k_proj, heads.key), (parts.v_proj, heads.value)):
            flat = part.reshape(-1, part.shape[2])
            projection.weight.copy_(flat[:, :WIDTH])
            if projection.bias is not None:
                projection.bias.copy_(flat[:, WIDTH])
        output.weight.copy_(heads.output.reshape(-1, WIDTH).T)


def _copies(heads: AttentionHeads, rotary: Rotary) -> AttentionHeads:
    keys, values = free_key_basis(rotary, DIM, HEADS), free_key_basis(Rotary(0), DIM, HEADS)
    return replace(heads, key=keys @ heads.key[[0, 0, 2, 2]], value=values @ heads.value[[0, 0, 2, 2]])


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    logits = model(input_ids=TOKENS).logits
    assert isinstance(logits, Tensor)
    return logits


@pytest.mark.parametrize("name", ["llama", "glm"])
def test_merged_stock_model_computes_the_same_logits(name: str) -> None:
    build, rotary = MODELS[name]
    original, merged = _randomise(build(HEADS)), _randomise(build(2))
    merged.load_state_dict(
        {key: value for key, value in original.state_dict().items() if ".k_proj" not in key and ".v_proj" not in key},
        strict=False,
    )
    for before, after in zip(_attentions(original), _attentions(merged), strict=True):
        heads = _copies(_read(before), rotary)
        _write(before, heads)
        _write(after, merge_subspace(heads, 2, rotary=rotary).heads)
    torch.testing.assert_close(_logits(merged), _logits(original), atol=1e-6, rtol=1e-6)


def _repeat(heads: AttentionHeads, times: int) -> AttentionHeads:
    """The same layer with every KV head written once for each of its query heads."""
    return replace(heads, key=heads.key.repeat_interleave(times, 0), value=heads.value.repeat_interleave(times, 0))


def test_gptj_whose_heads_are_copies_keeps_its_logits() -> None:
    """GPT-J's class has no KV heads: the shared heads are written back once for each query head."""
    build, rotary = MODELS["gptj"]
    model = _randomise(build(HEADS))
    for attention in _attentions(model):
        _write(attention, _copies(_read(attention), rotary))
    before = _logits(model)
    for attention in _attentions(model):
        _write(attention, _repeat(merge_subspace(_read(attention), 2, rotary=rotary).heads, 2))
    torch.testing.assert_close(_logits(model), before, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["llama", "glm", "gptj"])
def test_the_wrong_pairing_changes_the_logits(name: str) -> None:
    build, rotary = MODELS[name]
    wrong = Rotary(rotary.dim, not rotary.interleaved)
    model = _randomise(build(HEADS))
    for attention in _attentions(model):
        _write(attention, _copies(_read(attention), rotary))
    before = _logits(model)
    for attention in _attentions(model):
        _write(attention, _repeat(merge_subspace(_read(attention), 2, rotary=wrong).heads, 2))
    assert (_logits(model) - before).abs().max() > 1e-2
