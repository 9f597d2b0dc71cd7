"""``--expanded``: merged heads written as often as they are read, for the stock class. It saves nothing, and says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner, Result

from gqaconvert.cli.app import app
from tests.families import cases, test_shipped
from tests.families.cases import VOCABULARY, tensors_of
from tests.families.reference import QUERY_HEADS, expanded_reference

TOKENS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
SHIPPED = ("t5_v1_0", "gpt_neox", "gpt2", "bloom", "mpt", "whisper")
STOCK = ("llama", "phi3", "stablelm_qk_layernorm", "gpt_bigcode_mha", "falcon_rw")


ALL: tuple[Any, ...] = (*test_shipped.CASES, *cases.CASES)


def _case(name: str) -> Any:  # noqa: ANN401
    return next(case for case in ALL if case.name == name)


def _convert(source: Path, destination: Path, kv_heads: int, *more: str) -> Result:
    arguments = ["convert", str(source), str(destination), "--kv-heads", str(kv_heads), "--expanded", *more]
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize("name", [*SHIPPED, *STOCK])
def test_is_the_reference_itself(name: str, tmp_path: Path) -> None:
    """The files hold exactly what the stock module holds when its heads are overwritten by their group's mean."""
    case = _case(name)
    model = case.build()
    model.save_pretrained(tmp_path / "source")
    expanded_reference(model, case.layout, QUERY_HEADS, 2).save_pretrained(tmp_path / "reference")
    result = _convert(tmp_path / "source", tmp_path / "out", 2)
    assert result.exit_code == 0, result.output
    expected, found = tensors_of(tmp_path / "reference"), tensors_of(tmp_path / "out")
    assert expected.keys() == found.keys()
    for tensor, value in expected.items():
        assert torch.equal(value, found[tensor]), tensor
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("source", "out"))
    assert before == after
    check = CliRunner().invoke(app, ["validate", str(tmp_path / "source"), str(tmp_path / "out"), "--level", "files"])
    assert check.exit_code == 0, check.output


def test_command_and_card_say_that_it_saves_nothing(tmp_path: Path) -> None:
    _case("gpt_neox").build().save_pretrained(tmp_path / "source")
    result = _convert(tmp_path / "source", tmp_path / "out", 2)
    assert "neither weights nor cache shrink" in result.stderr
    assert "**This model saves nothing.**" in (tmp_path / "out" / "README.md").read_text()
    dry = _convert(tmp_path / "source", tmp_path / "other", 2, "--dry-run", "--json")
    document = json.loads(dry.stdout)
    assert document["form"] == "expanded"
    assert document["cache_bytes_per_token"]["source"] == document["cache_bytes_per_token"]["target"]
    assert document["source_bytes"] == document["total_size"]
    shipped = ["convert", str(tmp_path / "source"), str(tmp_path / "other"), "--kv-heads", "2"]
    saving = CliRunner().invoke(app, shipped)
    assert "trust_remote_code=True" in saving.stderr
    assert "modeling_gqaconvert.py" in (tmp_path / "other" / "README.md").read_text()


@pytest.mark.parametrize("method", ["subspace", "align"])
def test_methods_that_merge_whole_layers(method: str, tmp_path: Path) -> None:
    """The same merge as without the option, so the same logits."""
    case = _case("llama")
    case.build().save_pretrained(tmp_path / "source")
    assert _convert(tmp_path / "source", tmp_path / "wide", 2, "--method", method).exit_code == 0
    plain = ["convert", str(tmp_path / "source"), str(tmp_path / "narrow"), "--kv-heads", "2", "--method", method]
    assert CliRunner().invoke(app, plain).exit_code == 0
    auto: Any = transformers.AutoModelForCausalLM
    models = [auto.from_pretrained(tmp_path / name).eval() for name in ("wide", "narrow")]
    with torch.no_grad():
        wide, narrow = (model(TOKENS, use_cache=False).logits for model in models)
    assert (wide - narrow).abs().max() <= 1e-5 * wide.abs().max()
    check = CliRunner().invoke(app, ["validate", str(tmp_path / "source"), str(tmp_path / "wide"), "--level", "files"])
    assert check.exit_code == 0, check.output


def test_a_grouped_source_is_grouped_further(tmp_path: Path) -> None:
    case = _case("llama_gqa_source")
    case.build().save_pretrained(tmp_path / "source")
    assert _convert(tmp_path / "source", tmp_path / "out", 2).exit_code == 0
    auto: Any = transformers.AutoModelForCausalLM
    out = auto.from_pretrained(tmp_path / "out").eval()
    assert out.config.num_key_value_heads == QUERY_HEADS
    reference = expanded_reference(case.build(), case.layout, 4, 2)
    with torch.no_grad():
        found, expected = (model(TOKENS, use_cache=False).logits for model in (out, reference))
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    check = CliRunner().invoke(app, ["validate", str(tmp_path / "source"), str(tmp_path / "out"), "--level", "files"])
    assert check.exit_code == 0, check.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["3"], "possible counts: 1, 2, 4"),
        (["8"], "possible counts: 1, 2, 4"),
        (["2", "--method", "subspace", "--calibrate", "example"], "--expanded does not go with"),
    ],
)
def test_refusals(arguments: list[str], words: str, tmp_path: Path) -> None:
    _case("llama").build().save_pretrained(tmp_path / "source")
    result = _convert(tmp_path / "source", tmp_path / "out", int(arguments[0]), *arguments[1:])
    assert result.exit_code == 2
    assert words in result.stderr
