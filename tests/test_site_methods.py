"""Subspace and align from the command line, on the trained example model: quality, resuming, reports, refusals."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner, Result

from gqaconvert.cli.app import app
from tests.support.perplexity import perplexity

EXAMPLES = Path(__file__).parents[1] / "examples"
MODEL = EXAMPLES / "tiny-llama"
CALIBRATED = ["--method", "subspace", "--calibrate", "example", "--calibration-tokens", "4096", "--refine", "3"]


def convert(destination: Path, *options: str) -> Result:
    """Run the command in this process; it must succeed."""
    result = CliRunner().invoke(app, ["convert", str(MODEL), str(destination), "--kv-heads", "2", *options])
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    return result


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The calibrated and refined conversion, in one go."""
    destination = tmp_path_factory.mktemp("whole") / "model"
    convert(destination, *CALIBRATED)
    return destination


def test_quality_on_the_trained_example(tmp_path: Path, uninterrupted: Path) -> None:
    text = (EXAMPLES / "heldout.txt").read_text("utf-8")
    found = {"refined": perplexity(uninterrupted, text, window=256, windows=12)}
    found["original"] = perplexity(MODEL, text, window=256, windows=12)
    for method in ("mean", "align", "subspace"):
        convert(tmp_path / method, "--method", method, "--quiet")
        found[method] = perplexity(tmp_path / method, text, window=256, windows=12)
    assert found["original"] < found["refined"] < found["subspace"] < found["align"] < found["mean"], found
    # Measured: original 11, subspace 1.23 x, mean 5 x. These bounds fail for a merge that does not undo itself in Q, O.
    assert found["subspace"] < 1.35 * found["original"], found
    assert found["mean"] > 3 * found["original"], found


def test_same_seed_same_bytes(tmp_path: Path, uninterrupted: Path) -> None:
    convert(tmp_path / "again", *CALIBRATED, "--quiet")
    assert content(tmp_path / "again") == content(uninterrupted)


def test_killed_between_layers_and_resumed(tmp_path: Path, uninterrupted: Path) -> None:
    command = [sys.executable, "-m", "gqaconvert", "convert", str(MODEL), str(tmp_path / "model"), "--kv-heads", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *CALIBRATED], stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    assert any("layer 1:" in line for line in process.stderr), "killed only after the second layer"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "model").exists()
    staging = tmp_path / ".model.gqaconvert"
    finished = json.loads((staging / "state.json").read_text())["finished"]
    assert {"work/00000", "work/00001"} <= finished.keys()
    done = subprocess.run(
        [*command, *CALIBRATED, "--resume"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    assert content(tmp_path / "model") == content(uninterrupted)
    assert not staging.exists()


def test_report_as_json_and_html(tmp_path: Path) -> None:
    convert(tmp_path / "one", "--method", "subspace", "--report", str(tmp_path / "report.json"))
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["schema"] == "gqaconvert.merge-report/1"
    assert [layer["layer"] for layer in document["layers"]] == [0, 1, 2, 3]
    for layer in document["layers"]:
        assert len(layer["key_explained"]) == len(layer["value_explained"]) == 2
        assert all(0 < share <= 1 for share in layer["key_explained"] + layer["value_explained"])
    convert(tmp_path / "two", *CALIBRATED, "--report", str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    assert page.count("<polyline") == 6
    assert "error after" in page
    assert not re.search(r"(src|href)=", page), "the page loads nothing"


def test_report_tells_the_entropy_of_the_attention(tmp_path: Path) -> None:
    """The source's, against a run of the whole stock model that returns its attention weights."""
    convert(tmp_path / "model", *CALIBRATED, "--report", str(tmp_path / "report.json"), "--quiet")
    layers = json.loads((tmp_path / "report.json").read_text())["layers"]
    tokens = AutoTokenizer.from_pretrained(MODEL)((EXAMPLES / "calibration.txt").read_text("utf-8"), verbose=False)
    held_out = torch.tensor(tokens["input_ids"][15 * 256 : 16 * 256])[None]  # the last of 4096 tokens' windows
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        weights = model(held_out, output_attentions=True).attentions
    for layer, weight in zip(layers, weights, strict=True):
        expected = float(-(weight * weight.clamp_min(1e-30).log()).sum(-1).mean())
        assert layer["source_attention_entropy"] == pytest.approx(expected, rel=1e-5)
        assert 0.5 * expected < layer["attention_entropy"] < 2 * expected


def test_joint_refinement_helps_and_is_resumed(tmp_path: Path, uninterrupted: Path) -> None:
    options = [*CALIBRATED, "--joint", "6", "--report", str(tmp_path / "report.json")]
    convert(tmp_path / "model", *options)
    (first, *_) = json.loads((tmp_path / "report.json").read_text())["layers"]
    assert first["joint_steps"] == 6
    assert first["divergence_after"] < 0.97 * first["divergence_before"]
    text = (EXAMPLES / "heldout.txt").read_text("utf-8")
    joint, alone = (perplexity(folder, text, window=256, windows=12) for folder in (tmp_path / "model", uninterrupted))
    assert joint < 0.995 * alone, (joint, alone)
    assert "together" in (tmp_path / "model" / "README.md").read_text()

    command = [sys.executable, "-m", "gqaconvert", "convert", str(MODEL), str(tmp_path / "again"), "--kv-heads", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    assert any("joint step 2 of 6" in line for line in process.stderr)
    process.kill()
    process.wait()
    finished = json.loads((tmp_path / ".again.gqaconvert" / "state.json").read_text())["finished"]
    assert {"work/00003-layerwise"} <= finished.keys()
    subprocess.run([*command, *options, "--resume"], capture_output=True, env=environment, check=True)
    assert content(tmp_path / "again") == content(tmp_path / "model")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--joint", "8"], "--joint"),
        (["--refine", "8"], "--refine"),
        (["--calibrate", "example"], "--calibrate"),
        (["--grouping", "similar"], "--grouping"),
        (["--method", "subspace", "--grouping", "odd"], "odd"),
        (["--method", "subspace", "--refine", "many"], "many"),
        (["--method", "subspace", "--calibrate", "no-such-file.txt"], "no-such-file.txt"),
        (["--method", "subspace", "--calibrate", "example", "--calibration-tokens", "300"], "calibration needs"),
        (["--method", "mean", "--report", "report.html"], "--report"),
        (["--method", "subspace", "--report", "report.pdf"], ".html or .json"),
        (["--method", "subspase"], "subspace"),
    ],
)
def test_refused(tmp_path: Path, options: list[str], message: str) -> None:
    arguments = ["convert", str(MODEL), str(tmp_path / "model"), "--kv-heads", "2", *options]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_bad_calibration_text(tmp_path: Path) -> None:
    for name, data in (("latin.txt", b"caf\xe9 " * 4000), ("lines.jsonl", b'{"text": "fine"}\n{"body": 1}\n')):
        (tmp_path / name).write_bytes(data)
        arguments = ["convert", str(MODEL), str(tmp_path / "model"), "--kv-heads", "2", "--method", "subspace"]
        result = CliRunner().invoke(app, [*arguments, "--calibrate", str(tmp_path / name)])
        assert result.exit_code == 2, result.output
        assert name in result.stderr
        assert not (tmp_path / "model").exists()


def test_jsonl_is_the_same_text(tmp_path: Path) -> None:
    text = (EXAMPLES / "calibration.txt").read_text("utf-8")
    (tmp_path / "one.jsonl").write_text(json.dumps({"text": text}) + "\n")
    options = ["--method", "subspace", "--calibration-tokens", "2048", "--quiet"]
    convert(tmp_path / "lines", *options, "--calibrate", str(tmp_path / "one.jsonl"))
    convert(tmp_path / "plain", *options, "--calibrate", "example")
    assert content(tmp_path / "lines")["model.safetensors"] == content(tmp_path / "plain")["model.safetensors"]


def test_the_recipe_is_recorded(uninterrupted: Path) -> None:
    recipe = json.loads((uninterrupted / "gqaconvert.json").read_text())["recipe"]
    assert recipe["method"] == "subspace"
    assert recipe["refine"] == 3
    assert recipe["calibration"]["tokens"] == 4096
    card = (uninterrupted / "README.md").read_text()
    assert "`subspace`" in card
    assert "4,096 tokens" in card


def test_contexts_and_vocabularies_of_large_models_are_sizes_like_others(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "source")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config["max_position_embeddings"] = 1_048_576
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    options = ["--kv-heads", "2", "--method", "subspace", "--calibrate", "example", "--calibration-tokens", "2048"]
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "source"), str(tmp_path / "target"), *options])
    assert result.exit_code == 0, result.stderr
