"""Packed documents in stock models: each must be computed as if it were alone, and a model that leaks is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTBigCodeConfig,
    GPTBigCodeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gqaconvert.errors import UnsupportedModelError
from gqaconvert.uptrain.packing import documents_are_apart, make_batch, require_apart

MODEL = Path(__file__).parents[2] / "examples" / "tiny-llama"
SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=5)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, sliding_window=5)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**{k: v for k, v in SHAPE.items() if k != "head_dim"})),
    "falcon": lambda: FalconForCausalLM(FalconConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, new_decoder_architecture=True, num_kv_heads=2)),
    "gpt_bigcode": lambda: GPTBigCodeForCausalLM(GPTBigCodeConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_packed_document_is_computed_as_if_alone(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    lengths = [9, 7, 1, 14]
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(1, 64, (length,), generator=generator) for length in lengths]
    for document in documents:
        document[-1] = 0
    row = torch.cat(documents)[None]
    batch = make_batch(row.numpy(), packing="document", end=0)
    with torch.no_grad():
        packed = model(**batch.inputs()).logits[0]
        alone = torch.cat([model(input_ids=document[None], use_cache=False).logits[0] for document in documents])
        joined = model(input_ids=row, use_cache=False).logits[0]
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(packed, joined, rtol=1e-2, atol=1e-3)
    assert documents_are_apart(model, 64)


def test_a_model_that_leaks_is_refused() -> None:
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(UnsupportedModelError, match="see each other"):
        require_apart(model, 64)
    assert model.training


def test_the_loss_of_packed_documents_is_the_mean_over_their_own_tokens() -> None:
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(MODEL, dtype=torch.float32).eval()
    tokens = np.random.default_rng(0).integers(1, 512, (2, 40))
    tokens[:, (10, 25)] = 0
    batch = make_batch(tokens, packing="document", end=0)
    with torch.no_grad():
        loss = model(**batch.inputs(), labels=batch.labels).loss
        total = count = 0.0
        for row in tokens:
            for start, stop in ((0, 11), (11, 26), (26, 40)):
                part = torch.tensor(row[start:stop])[None]
                total += float(model(input_ids=part, labels=part).loss) * (stop - start - 1)
                count += stop - start - 1
    assert batch.predicted == count
    assert float(loss) == pytest.approx(total / count, rel=1e-5)
