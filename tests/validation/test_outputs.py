"""What validate prints and writes, and the CI example's own shell steps."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import pytest
import torch
import yaml

import gqaconvert
from gqaconvert.memory import free_memory
from tests.support.runs import convert, edit_config, edit_tensors, fails, invoke, read_tensors

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny-llama"
SCHEMA = json.loads((Path(gqaconvert.__file__).parent / "schemas" / "validate-1.json").read_text())


def test_quality_of_the_example_model(tmp_path: Path) -> None:
    """The figures of examples/README.md, which another program measured: 11.1 and 56.7."""
    output = convert(TINY, tmp_path / "out", "--kv-heads", 2)
    page, xml = tmp_path / "report.html", tmp_path / "report.xml"
    result = invoke("validate", TINY, output, "--max-tokens", 4096, "--json", "--html", page, "--junit", xml)
    report = json.loads(result.stdout)
    jsonschema.validate(report, SCHEMA)
    assert result.exit_code == 0
    assert report["quality"]["source_perplexity"] == pytest.approx(11.13, rel=0.1)
    assert report["quality"]["perplexity"] == pytest.approx(56.7, rel=0.1)
    assert len(report["quality"]["layers"]) == 4
    cases = ElementTree.parse(xml).getroot().findall("testcase")
    assert [case.get("name") for case in cases] == [check["name"] for check in report["checks"]]
    text = page.read_text()
    assert text.count("<svg") == 4
    assert not re.search(r"(src|href)=|@import|url\(", text)
    assert invoke("validate", TINY, output, "--max-tokens", 512, "--max-ppl-ratio", 2).exit_code == 1


def test_the_source_against_itself(tmp_path: Path) -> None:
    """Repeating heads computes the same function: no loss at all."""
    small = convert(TINY, tmp_path / "small", "--kv-heads", 4)
    grown = convert(small, tmp_path / "grown", "--kv-heads", 8)
    arguments = ("validate", small, grown, "--max-tokens", 512, "--max-kl", 1e-6, "--min-top1", 1, "--json")
    result = invoke(*arguments)
    report = json.loads(result.stdout)
    assert result.exit_code == 0, [check for check in report["checks"] if check["status"] == "failed"]
    assert report["quality"]["perplexity_ratio"] == pytest.approx(1, abs=1e-5)


def test_own_text(tmp_path: Path) -> None:
    """Lines of JSON: both documents count, one after the other."""
    output = convert(TINY, tmp_path / "out", "--kv-heads", 4)
    words = (ROOT / "examples" / "heldout.txt").read_text()[:400]
    tokens = []
    for copies in (1, 2):
        text = tmp_path / f"{copies}.jsonl"
        text.write_text("\n".join([json.dumps({"text": words})] * copies))
        report = json.loads(invoke("validate", TINY, output, "--text", text, "--json").stdout)
        assert [check["seconds"] > 0 for check in report["checks"] if check["name"] == "quality.perplexity"] == [True]
        tokens.append(report["quality"]["tokens"])
    # One window less its first token, and twice that: in as many windows as the context of 256 makes of them.
    assert 100 < tokens[0] < 255
    assert tokens[1] in (2 * (tokens[0] + 1) - 1, 2 * (tokens[0] + 1) - 2)


def test_text_that_is_none(tmp_path: Path) -> None:
    output = convert(TINY, tmp_path / "out", "--kv-heads", 4)
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "Fellow citizens"}\n{"words": 1}\n')
    assert "line 2" in fails(2, "validate", TINY, output, "--level", "quality", "--text", text)
    text.write_text("")
    assert "too little text" in fails(2, "validate", TINY, output, "--level", "quality", "--text", text)
    # Before anything is read: a long comparison would be for nothing.
    assert "no such text file" in fails(2, "validate", TINY, output, "--text", tmp_path / "none.txt")


def test_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that may take one more MiB: an error or a skipped check, and no attempt."""
    output = convert(TINY, tmp_path / "out", "--kv-heads", 4)
    for name, text in (("max", 2**30), ("current", 2**30 - 2**20), ("memory.stat", "anon 1\ninactive_file 4096")):
        (tmp_path / name).write_text(f"{text}\n")
    container = (str(tmp_path / "max"), str(tmp_path / "current"), "inactive_file")
    monkeypatch.setattr("gqaconvert.memory._CGROUPS", (container,))
    assert free_memory() == 2**20 + 4096
    assert "0.0 GiB are free" in fails(3, "validate", TINY, output, "--level", "logits")
    report = json.loads(invoke("validate", TINY, output, "--json").stdout)
    assert [check["name"] for check in report["checks"] if check["status"] == "skipped"] == ["logits.loading"]


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """NaN is no JSON, and no place in a plot."""
    output = convert(TINY, tmp_path / "out", "--kv-heads", 4)
    name = "model.layers.1.self_attn.v_proj.weight"
    edit_tensors(output, {name: torch.full_like(read_tensors(output)[name], torch.nan)})
    page = tmp_path / "report.html"
    result = invoke(
        "validate", TINY, output, "--max-tokens", 64, "--html", page, "--junit", tmp_path / "x.xml", "--json"
    )
    assert result.exit_code == 1
    report = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(name))
    jsonschema.validate(report, SCHEMA)
    red = {check["name"] for check in report["checks"] if check["status"] == "failed"}
    assert red == {
        "files.pooled-weights",
        "files.hashes",
        "logits.prefill",
        "logits.decode",
        "quality.perplexity",
        "quality.kl",
    }
    assert report["quality"]["perplexity"] is None
    assert not re.search(r"(points|x|y|cx|cy|width)=\"[^\"]*(nan|inf)", page.read_text())


def test_annotations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = convert(TINY, tmp_path / "out", "--kv-heads", 2)
    edit_config(output, rms_norm_eps=0.1)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    result = invoke("validate", TINY, output, "--level", "files")
    assert result.exit_code == 1
    lines = [line for line in result.stdout.splitlines() if line.startswith("::error")]
    assert len(lines) == 1
    assert lines[0].startswith("::error title=files.config::")
    assert "| files.config | failed |" in (tmp_path / "summary.md").read_text()


def test_bad_input(tmp_path: Path) -> None:
    output = convert(TINY, tmp_path / "out", "--kv-heads", 2)
    fails(2, "validate", tmp_path / "nothing", output)
    fails(2, "validate", TINY, output, "--level", "everything")
    fails(2, "validate", output, "--level", "logits")
    # A threshold that nobody would look at, or that nothing can meet, is no check.
    fails(2, "validate", TINY, output, "--level", "files", "--max-kl", 1)
    fails(2, "validate", output, "--max-kl", 1)
    fails(2, "validate", TINY, output, "--max-kl", "nan")
    fails(2, "validate", TINY, output, "--min-top1", 7)


def test_the_action_runs(tmp_path: Path) -> None:
    """The composite action's shell steps, with inputs as the workflow gives them."""
    action = yaml.safe_load((ROOT / "examples" / "ci" / "action.yml").read_text())
    workflow = yaml.safe_load((ROOT / "examples" / "ci" / "validate.yml").read_text())
    step = next(step for step in workflow["jobs"]["validate"]["steps"] if step.get("uses", "").startswith("./"))
    inputs = {name: str(fields.get("default", "")) for name, fields in action["inputs"].items()} | step["with"]
    inputs["source"] = str(ROOT / inputs["source"])
    inputs["validate-options"] += " --max-tokens 512"
    (tmp_path / "gqaconvert").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gqaconvert "$@"\n')
    (tmp_path / "gqaconvert").chmod(0o755)
    for part in action["runs"]["steps"]:
        given = {
            key: re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda m: inputs[m[1]], v) for key, v in part["env"].items()
        }
        environment = {**os.environ, **given, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-eo", "pipefail", "-c", part["run"]], cwd=tmp_path, env=environment, check=False
        )
        assert done.returncode == 0
    assert ElementTree.parse(tmp_path / "validate.xml").getroot().get("failures") == "0"
    assert (tmp_path / "validate.html").is_file()
