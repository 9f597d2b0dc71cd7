"""``gqaconvert uptrain`` and ``trainers``, from the outside."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator
from transformers import AutoModelForCausalLM

from tests.support.runs import COMMAND, convert, fails, invoke, read_json, read_tensors
from tests.test_schemas import schema
from tests.uptrain.jobs import VOCABULARY, tiny_llama

ROOT = Path(__file__).parents[2]
TINY, TEXT = ROOT / "examples/tiny-llama", ROOT / "examples/calibration.txt"
PLUGIN = ROOT / "examples/trainer-plugin"
SHORT = ("--seq-len", 16, "--batch-size", 4, "--eval-windows", 2, "--lr", "3e-3", "--threads", 1)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("command")


@pytest.fixture(scope="module")
def model(place: Path) -> Path:
    """Converted from a model that is still there."""
    return convert(tiny_llama(place / "source"), place / "model", "--kv-heads", 2)


@pytest.fixture(scope="module")
def tokens(place: Path) -> Path:
    ids = np.random.default_rng(0).integers(0, VOCABULARY, 4000).cumsum() % 7
    np.save(place / "tokens.npy", ids.astype(np.uint16))
    return place / "tokens.npy"


def check(document: Any, name: str) -> None:  # noqa: ANN401
    Draft202012Validator.check_schema(schema(name))
    Draft202012Validator(schema(name)).validate(document)


def metrics(out: Path) -> list[dict[str, Any]]:
    """Without what the clock says."""
    lines = (out / "uptraining/metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if "second" not in k} for line in lines]


def test_the_example_model_from_text_to_a_model_card(place: Path) -> None:
    converted, out = convert(TINY, place / "mean2", "--kv-heads", 2), place / "trained"
    arguments = (
        "uptrain", converted, "--out", out, "--data", TEXT, "--steps", 6, "--seq-len", 64, "--lr", "1e-3",
        "--loss", "distill", "--eval-windows", 4, "--eval-every", 3, "--threads", 1,
    )  # fmt: skip
    planned = json.loads(invoke(*arguments, "--dry-run", "--json").stdout)
    check(planned, "uptrain-1")
    assert planned["budget"]["tokens"] == 6 * 8 * 64
    assert planned["budget"]["alpha"] == pytest.approx(6 * 8 * 64 / (1500 * 8 * 256))
    assert not out.exists()
    assert not (place / ".trained.uptrain").exists()
    done = json.loads(invoke(*arguments, "--json").stdout)
    check(done, "uptrain-1")
    check(read_json(out / "gqaconvert.json"), "uptrain-provenance-1")
    outcome = done["outcome"]
    assert outcome["finished"]
    assert outcome["eval_after"] < outcome["eval_before"] - 0.2
    assert done["source_loss"] < outcome["eval_after"]
    assert [record["step"] for record in metrics(out) if "eval_loss" in record] == [0, 3, 6]
    assert (out / "uptraining/loss.png").read_bytes().startswith(b"\x89PNG")
    card = (out / "README.md").read_text()
    for figure in (outcome["eval_before"], outcome["eval_after"], done["source_loss"]):
        assert f"{figure:.4f}" in card
    assert not (place / ".trained.uptrain").exists()

    before, after = read_tensors(converted), read_tensors(out)
    assert {name: (t.dtype, t.shape) for name, t in before.items()} == {
        name: (t.dtype, t.shape) for name, t in after.items()
    }
    auto: Any = AutoModelForCausalLM
    stock, info = auto.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert stock.config.num_key_value_heads == 2
    shown = " ".join(invoke("inspect", out).stdout.split())
    assert "uptrained; that by gqaconvert" in shown
    assert "method mean" in shown
    verdict = json.loads(invoke("validate", TINY, out, "--max-tokens", 256, "--json").stdout)
    assert {entry["status"] for entry in verdict["checks"]} == {"passed", "skipped"}
    assert {"logits.prefill", "files.finite", "files.hashes"} <= {
        entry["name"] for entry in verdict["checks"] if entry["status"] == "passed"
    }
    # Asked again, it is there already.
    again = json.loads(invoke(*arguments, "--json").stdout)
    assert again["outcome"] == outcome


def test_only_kv_leaves_the_rest_bit_for_bit(place: Path, model: Path, tokens: Path) -> None:
    out = place / "kv"
    arguments = ("uptrain", model, "--out", out, "--data", tokens, "--steps", 2, *SHORT, "--trainable", "kv", "--quiet")
    assert invoke(*arguments).exit_code == 0
    before, after = read_tensors(model), read_tensors(out)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".k_proj." in name or ".v_proj." in name}
    verdict = json.loads(invoke("validate", place / "source", out, "--level", "files", "--json").stdout)
    untouched = next(entry for entry in verdict["checks"] if entry["name"] == "files.untouched")
    assert untouched["status"] == "passed"
    assert not untouched["message"].startswith("0 ")
    # And a weight that was not to be trained is noticed.
    torch.manual_seed(0)
    damaged = shutil.copytree(out, place / "kv-damaged")
    file = damaged / "model.safetensors"
    data = bytearray(file.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start = header["model.layers.0.mlp.up_proj.weight"]["data_offsets"][0] + 8 + int.from_bytes(data[:8], "little")
    data[start] ^= 1
    file.write_bytes(data)
    verdict = json.loads(invoke("validate", place / "source", damaged, "--level", "files", "--json").stdout)
    assert {entry["name"] for entry in verdict["checks"] if entry["status"] == "failed"} == {
        "files.untouched", "files.hashes"
    }  # fmt: skip


def started(*arguments: object) -> "subprocess.Popen[str]":
    command = [*COMMAND, *(str(argument) for argument in arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from (json.loads(line) for line in path.read_text().splitlines() if line.endswith("}"))


def stop_after(step: int, number: int, *arguments: object) -> tuple[int, str]:
    """(exit code, stderr) of a command that gets a signal once a step is in its metrics."""
    out = Path(str(arguments[arguments.index("--out") + 1]))
    running = started(*arguments)
    deadline = time.monotonic() + 120
    while all(record["step"] < step for record in lines_of(out.parent / f".{out.name}.uptrain/metrics.jsonl")):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.send_signal(number)
    _, errors = running.communicate(timeout=60)
    return running.returncode, errors


def test_killed_and_interrupted_runs_end_with_the_same_bytes(place: Path, model: Path, tokens: Path) -> None:
    def arguments(name: str) -> tuple[object, ...]:
        return (
            "uptrain", model, "--out", place / name, "--data", tokens, "--steps", 60, *SHORT, "--checkpoint-every", 5
        )  # fmt: skip

    assert invoke(*arguments("whole"), "--quiet").exit_code == 0
    whole = (place / "whole/model.safetensors").read_bytes()
    stopped = arguments("stopped")
    assert stop_after(12, signal.SIGKILL, *stopped)[0] == -signal.SIGKILL
    assert not (place / "stopped").exists()
    changed = [9e-3 if argument == "3e-3" else argument for argument in stopped]
    assert "learning_rate: 0.003, now 0.009" in fails(2, *changed)
    code, errors = stop_after(30, signal.SIGTERM, *stopped)
    assert code == 130
    assert "the same command goes on" in errors
    assert not (place / "stopped").exists()
    result = invoke(*stopped)
    assert result.exit_code == 0
    assert "step 6 of 60" not in result.stderr
    assert (place / "stopped/model.safetensors").read_bytes() == whole
    assert metrics(place / "stopped") == metrics(place / "whole")
    assert "is not empty" in fails(2, *changed[:2], "--out", place / "stopped", *changed[4:])


def test_torchrun_by_the_user(place: Path, model: Path, tokens: Path) -> None:
    arguments = ("uptrain", model, "--data", tokens, "--steps", 3, *SHORT)
    assert invoke(*arguments, "--out", place / "alone", "--quiet").exit_code == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "gqaconvert", *map(str, arguments), "--out", str(place / "both"), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert result.returncode == 0, result.stderr
    check(json.loads(result.stdout), "uptrain-1")  # one document: the others are silent
    alone, both = metrics(place / "alone"), metrics(place / "both")
    for key in ("loss", "eval_loss"):
        assert [r[key] for r in both if key in r] == pytest.approx([r[key] for r in alone if key in r], abs=2e-6)


def test_a_run_out_of_time_goes_on(place: Path, model: Path, tokens: Path) -> None:
    arguments = ("uptrain", model, "--out", place / "time", "--data", tokens, "--steps", 4, *SHORT)
    result = invoke(*arguments, "--max-time", "0.001s")
    assert result.exit_code == 0
    assert "stopped after 1 of 4 steps" in result.stderr
    assert not (place / "time").exists()
    assert invoke(*arguments).exit_code == 0
    assert (place / "time/config.json").exists()


def test_bad_input_is_named_and_nothing_is_written(place: Path, model: Path, tokens: Path, tmp_path: Path) -> None:
    def refused(*options: object, source: Path = model, data: object = tokens, code: int = 2) -> str:
        out = tmp_path / "out"
        message = fails(code, "uptrain", source, "--out", out, "--data", data, *SHORT, *options)
        assert not out.exists()
        return message

    assert "by nothing" in refused()
    assert "--steps and --tokens" in refused("--steps", 1, "--tokens", "1k")
    assert "in no config.json" in refused("--alpha", 0.05)
    assert "in (0, 1]" in refused("--alpha", 5, "--pretrain-tokens", "1M")
    assert "no such choice" in refused("--steps", 1, "--loss", "mse")
    assert "no trainer 'tpu'" in refused("--steps", 1, "--trainer", "tpu")
    assert "no option 'x'" in refused("--steps", 1, "--option", "x=1")
    assert "no tracker 'paper'" in refused("--steps", 1, "--report-to", "paper")
    assert "is not positive" in refused("--steps", 1, "--lr", 0)
    assert "no GPU" in refused("--steps", 1, "--gpu", "abacus")
    assert "no multiple of 3" in refused("--steps", 1, "--nproc", 3)
    assert "no such" in refused("--steps", 1, data=tmp_path / "none.txt")
    (tmp_path / "empty.npy").write_bytes(b"")
    assert "is no .npy file" in refused("--steps", 1, "--restart", data=tmp_path / "empty.npy")
    np.save(tmp_path / "large.npy", np.full(900, VOCABULARY, np.uint16))
    assert f"the token id {VOCABULARY}" in refused("--steps", 1, "--restart", data=tmp_path / "large.npy")
    np.save(tmp_path / "short.npy", np.zeros(9, np.uint16))
    assert "less than one sequence" in refused("--steps", 1, "--restart", data=tmp_path / "short.npy")
    text = tmp_path / "text.txt"
    text.write_text("words\n")
    assert "tokenizer" in refused("--steps", 1, "--restart", data=text)
    assert "belongs to --loss" in refused("--steps", 1, "--teacher", model)
    assert "no teacher for" in refused("--steps", 1, "--loss", "distill", "--teacher", TINY, "--restart")
    plain = tiny_llama(tmp_path / "plain")
    assert "does not record" in refused("--steps", 1, "--loss", "mixed", source=plain)
    gone = convert(plain, tmp_path / "orphan", "--kv-heads", 2)
    tiny_llama(plain, kv_heads=2)  # something else under the same name
    assert "is not the model that was converted" in refused("--steps", 1, "--loss", "mixed", source=gone)
    shutil.rmtree(plain)
    assert "cannot be opened" in refused("--steps", 1, "--loss", "mixed", source=gone)
    assert "overlap" in fails(2, "uptrain", model, "--out", model / "in", "--data", tokens, *SHORT, "--steps", 1)
    assert "the loss is" in refused("--steps", 4, "--lr", "1e30", "--restart", "--quiet", code=1)


def test_without_transformers(model: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gqaconvert.uptraining.find_spec", lambda name: None)
    message = fails(3, "uptrain", model, "--out", tmp_path / "out", "--data", tokens, "--steps", 1)
    assert "pip install 'gqaconvert[transformers]'" in message


def test_a_plug_in_and_a_broken_one(place: Path, model: Path, tokens: Path) -> None:
    packages, source = place / "packages", shutil.copytree(PLUGIN, place / "plugin")
    assert len((source / "gqaconvert_sgd.py").read_text().splitlines()) < 60
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*install, "--target", str(packages), str(source)], check=True, timeout=240)
    broken = packages / "broken-1.0.dist-info"
    broken.mkdir()
    (broken / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (broken / "entry_points.txt").write_text("[gqaconvert.trainers]\nbroken = no_such_module:Trainer\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(packages), str(ROOT)])}

    def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
        command = [*COMMAND, *(str(argument) for argument in arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=240)

    listed = json.loads(run("trainers", "--json").stdout)
    check(listed, "trainers-1")
    by_name = {info["name"]: info for info in listed["trainers"]}
    assert by_name.keys() == {"torch", "transformers", "sgd", "broken"}
    assert by_name["sgd"]["package"] == "gqaconvert-sgd"
    assert by_name["sgd"]["capabilities"]["losses"] == ["lm"]
    assert "no_such_module" in by_name["broken"]["fault"]
    assert "broken:" in run("trainers").stdout
    out = place / "by-sgd"
    arguments = ("uptrain", model, "--out", out, "--data", tokens, "--steps", 8, *SHORT, "--trainer")
    result = run(*arguments, "sgd", "--lr", 0.5, "--option", "momentum=0.5")
    assert result.returncode == 0, result.stderr
    assert "does not promise" in result.stderr
    evaluations = [record["eval_loss"] for record in metrics(out) if "eval_loss" in record]
    assert evaluations[1] < evaluations[0]
    assert run("validate", place / "source", out, "--level", "files").returncode == 0
    assert "no_such_module" in run(*arguments, "broken", "--out", place / "x").stderr
