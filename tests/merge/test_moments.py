"""What hooks see inside stock layers, against the model run as it is."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, GPT2Config, LlamaConfig, PhiConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.phi.modeling_phi import PhiForCausalLM

from gqaconvert.merge.moments import attention_call, observe, record_calls, second_moment

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
TOKENS = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(0))


def _llama() -> tuple[nn.Module, Any, str]:
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    return model, model.model.layers, "self_attn"


def _phi() -> tuple[nn.Module, Any, str]:
    model = PhiForCausalLM(PhiConfig(**SIZES))
    return model, model.model.layers, "self_attn"


def _gemma2() -> tuple[nn.Module, Any, str]:
    """Alternates sliding and full masks: two kinds of layers in one model."""
    model = Gemma2ForCausalLM(Gemma2Config(**SIZES, head_dim=8, sliding_window=4, query_pre_attn_scalar=8))
    return model, model.model.layers, "self_attn"


def _gpt2() -> tuple[nn.Module, Any, str]:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=32, n_layer=3, n_head=4))
    return model, model.transformer.h, "attn"


@pytest.mark.parametrize("build", [_llama, _phi, _gemma2, _gpt2])
@torch.no_grad()
def test_recorded_calls_run_the_layers_as_the_model_does(build: Any) -> None:  # noqa: ANN401
    torch.manual_seed(0)
    model, layers, attention = build()
    model.eval()
    stock: Any = model
    expected = stock(input_ids=TOKENS, use_cache=False, output_hidden_states=True).hidden_states
    calls = record_calls(model, list(layers), TOKENS)
    assert len(calls) == 3
    hidden = calls[0].hidden
    torch.testing.assert_close(hidden, expected[0])
    for index, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        seen: list[torch.Tensor] = []
        module = layer.get_submodule(attention)
        handle = module.register_forward_hook(lambda _m, _a, out, seen=seen: seen.append(out[0]))
        direct = call.run(layer, hidden)
        handle.remove()
        output, attended = observe(layer, module, call, hidden)
        torch.testing.assert_close(output, direct)
        torch.testing.assert_close(attended, seen[0])
        inner = attention_call(layer, module, call, hidden)
        torch.testing.assert_close(inner.run(module), attended)
        hidden = output
        if index < 2:  # the last of the model's hidden states has the final norm in it
            torch.testing.assert_close(hidden, expected[index + 1])
    # The model is as it was.
    torch.testing.assert_close(
        stock(input_ids=TOKENS, use_cache=False, output_hidden_states=True).hidden_states[-1], expected[-1]
    )


def test_second_moment_is_the_mean_of_outer_products() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(2, 3, 4, generator=generator), torch.randn(1, 5, 4, generator=generator)]
    rows = [[*row, 1.0] for batch in batches for row in batch.reshape(-1, 4).tolist()]
    expected = [[sum(row[i] * row[j] for row in rows) / len(rows) for j in range(5)] for i in range(5)]
    with_bias = second_moment(batches, bias=True)
    torch.testing.assert_close(with_bias, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(second_moment(batches), with_bias[:4, :4])
    assert with_bias.dtype is torch.float64


def test_second_moment_needs_tokens() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        second_moment([])
