"""Calibrated merges on stock classes that differ in what a layer needs: masks, norms, scales, biases, experts.

The layers run one by one in empty shells of the stock class. If a shell computed something else than the model does, a
merge that is exact (planted equal heads) would show an error, or the entropy of the attention would differ.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from gqaconvert.cli.app import app
from tests.families.cases import CASES, Case
from tests.families.reference import expanded_reference

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = (
    "falcon_rw", "gemma", "gemma2", "gemma3_text", "gpt_oss", "apertus", "phi3", "qwen2", "olmo2", "stablelm_qk_layernorm",
    "mixtral", "qwen2_moe", "olmoe", "granitemoe",
)  # fmt: skip


def by_name(name: str) -> Case:
    """A case, with the example tokenizer's vocabulary."""
    (case,) = (case for case in CASES if case.name == name)
    return dataclasses.replace(case, overrides={**case.overrides, "vocab_size": 512})


def convert(folder: Path, kv_heads: int, *options: str) -> Result:
    """Add the tokenizer and run the command."""
    for path in (EXAMPLES / "tiny-llama").glob("tokenizer*"):
        shutil.copy(path, folder / "source")
    arguments = ["convert", str(folder / "source"), str(folder / "target"), "--kv-heads", str(kv_heads)]
    return CliRunner().invoke(
        app,
        [*arguments, "--method", "subspace", "--calibrate", "example", "--calibration-tokens", "1536", *options],
    )


@pytest.mark.parametrize("name", NAMES)
def test_shells_compute_what_the_model_computes(name: str, tmp_path: Path) -> None:
    case = by_name(name)
    target = max(target for target in case.targets if target < case.kv_heads)
    planted = expanded_reference(case.build(), case.layout, case.kv_heads, target)
    planted.save_pretrained(tmp_path / "source")
    options = ("--refine", "2", "--joint", "2", "--report", str(tmp_path / "report.json"))
    result = convert(tmp_path, target, *options)
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    layers = json.loads((tmp_path / "report.json").read_text())["layers"]
    for layer in layers:
        assert layer["error_before"] < 1e-9, layer
        assert abs(layer["divergence_before"]) < 1e-6, layer
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float32)
    text = (EXAMPLES / "calibration.txt").read_text("utf-8")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "source")(text, verbose=False)["input_ids"]
    window = min(512, getattr(planted.config, "max_position_embeddings", 512))
    count = 1536 // window
    with torch.no_grad():
        held_out = torch.tensor(tokens[(count - 1) * window : count * window])[None]
        eager = AutoModelForCausalLM.from_pretrained(
            tmp_path / "source", dtype=torch.float32, attn_implementation="eager"
        )
        weights = eager(held_out, output_attentions=True).attentions
        assert torch.isfinite(merged(held_out).logits).all()
    for layer, weight in zip(layers, weights, strict=True):
        expected = float(-(weight.double() * weight.double().clamp_min(1e-300).log()).sum(-1).mean())
        assert layer["source_attention_entropy"] in (None, pytest.approx(expected, rel=1e-4))


def test_files_that_no_stock_loader_maps_are_refused(tmp_path: Path) -> None:
    by_name("qwen2").build().save_pretrained(tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    renamed = {name.replace("mlp.gate_proj", "mlp.other_proj"): tensor for name, tensor in tensors.items()}
    save_file(renamed, tmp_path / "source" / "model.safetensors")
    result = convert(tmp_path, 1)
    assert result.exit_code == 2, f"{result.output} {result.exception!r}"
    assert "mlp.gate_proj" in result.stderr
    assert "--calibrate" in result.stderr
    assert not (tmp_path / "target").exists()
