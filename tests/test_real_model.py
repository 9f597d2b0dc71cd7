"""SmolLM2-135M: a real, trained grouped-query model (9 query heads, 3 KV heads, bfloat16)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.runs import convert, invoke, raw_tensors, read_json
from tests.support.smollm2 import smollm2_checkpoint

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def source() -> Path:
    return smollm2_checkpoint()


def test_to_one_kv_head_loads_and_generates(tmp_path: Path, source: Path) -> None:
    target = convert(source, tmp_path / "mqa", "--mqa")
    # float32: many CPUs have no fast bfloat16.
    loaded: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, output_loading_info=True)
    model, report = loaded
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_key_value_heads == 1
    tokenizer = AutoTokenizer.from_pretrained(target)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.inference_mode():
        output = model.generate(**prompt, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        logits = model(output).logits
    assert output.shape == (1, prompt["input_ids"].shape[1] + 8)
    assert torch.isfinite(logits).all()
    key = model.model.layers[0].self_attn.k_proj.weight
    assert key.shape == (64, 576)
    original = raw_tensors(source)["model.layers.0.self_attn.k_proj.weight"]
    heads = torch.frombuffer(bytearray(original.data), dtype=torch.bfloat16).view(3, 64, 576).double()
    # The mean of three, to half a unit in the last of bfloat16's 8 bits.
    assert ((key.double() - heads.mean(0)).abs() <= heads.mean(0).abs() * 2.0**-8).all()


def test_expanding_changes_nothing_and_comes_back(tmp_path: Path, source: Path) -> None:
    expanded = convert(source, tmp_path / "mha", "--kv-heads", 9)
    tokens = torch.randint(1000, 40000, (1, 12), generator=torch.Generator().manual_seed(0))
    logits = []
    for folder in (source, expanded):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            logits.append(model(tokens).logits)
    assert (logits[0] - logits[1]).abs().max() <= 1e-5 * logits[0].abs().max()
    back = convert(expanded, tmp_path / "gqa", "--kv-heads", 3)
    assert raw_tensors(back) == raw_tensors(source)
    assert read_json(back / "config.json") == read_json(source / "config.json")


def test_facts(source: Path) -> None:
    """Against the model card of SmolLM2-135M: 30 layers, 9 query heads, 3 KV heads, 134.5 million parameters."""
    import json

    facts = json.loads(invoke("inspect", source, "--json", "--check").stdout)
    assert facts["num_hidden_layers"] == 30
    assert facts["num_attention_heads"] == 9
    assert facts["num_key_value_heads"] == 3
    assert facts["head_dim"] == 64
    assert facts["attention"] == "GQA"
    assert facts["parameters"] == 134_515_008
    assert facts["tied_embeddings"] is True
    assert [option["num_key_value_heads"] for option in facts["kv_heads"]] == [1, 3, 9]
    assert facts["problems"] == []
