"""Every kind of fault that a conversion can have is built by hand, and the right check, and no other, goes red."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import llama_checkpoint
from tests.support.runs import SINGLE, convert, edit_config, edit_tensors, fails, invoke, read_json, write_json

HEADS, TARGET = 6, 2
SHARE = HEADS // TARGET


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A source with biases and 6 KV heads, and its conversion to 2: in groups of two, bfloat16 sums would be right."""
    source = llama_checkpoint(tmp_path / "source", dtype=torch.bfloat16, bias=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        write_json(source / name, {"name": name})
    return source, convert(source, tmp_path / "out", "--kv-heads", TARGET)


def failed(*arguments: object) -> set[str]:
    """Names of the red checks at the files level; the exit code must agree with them."""
    result = invoke("validate", *arguments, "--level", "files", "--json")
    report = json.loads(result.stdout)
    red = {check["name"] for check in report["checks"] if check["status"] == "failed"}
    assert result.exit_code == (1 if red else 0)
    assert report["passed"] == (not red)
    return red


def rehash(folder: Path) -> None:
    """Bring the record's hashes up to date: the fault was there before the converter hashed its output."""
    record = read_json(folder / "gqaconvert.json")
    for shard, fields in record["shards"].items():
        fields["sha256"] = hashlib.sha256((folder / shard).read_bytes()).hexdigest()
    write_json(folder / "gqaconvert.json", record)


def heads(source: Path, name: str) -> Tensor:
    """K or V heads of the source in float64: (heads, rows, columns)."""
    tensor = load_file(source / SINGLE)[name]
    return tensor.to(torch.float64).view(HEADS, tensor.shape[0] // HEADS, -1)


def swapped(found: Tensor) -> Tensor:
    """The right heads in a wrong order."""
    return found.view(TARGET, SHARE, *found.shape[1:]).mean(1).flip(0)


def tiled(found: Tensor) -> Tensor:
    """Head h in group h % G."""
    return found.view(SHARE, TARGET, *found.shape[1:]).mean(0)


def summed(found: Tensor) -> Tensor:
    """No division."""
    return found.view(TARGET, SHARE, *found.shape[1:]).sum(1)


def accumulated(found: Tensor) -> Tensor:
    """Summed and divided in bfloat16: every step rounds."""
    total = torch.zeros_like(found[0::SHARE], dtype=torch.bfloat16)
    for member in range(SHARE):
        total += found[member::SHARE].to(torch.bfloat16)
    return (total / SHARE).to(torch.float64)


def pairwise(found: Tensor) -> Tensor:
    """Rows of each head in the order of interleaved rotary pairs instead of half-split ones."""
    merged = found.view(TARGET, SHARE, *found.shape[1:]).mean(1)
    return merged.view(TARGET, 2, -1, merged.shape[-1]).transpose(1, 2).reshape(merged.shape)


def unpooled(found: Tensor) -> Tensor:
    """The first head alone."""
    return found[0::SHARE]


K, BIAS = "model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.k_proj.bias"


@pytest.mark.parametrize(
    ("name", "damage", "red"),
    [
        (K, swapped, "files.pooled-weights"),
        (K, tiled, "files.pooled-weights"),
        (K, summed, "files.pooled-weights"),
        (K, accumulated, "files.pooled-weights"),
        (K, pairwise, "files.pooled-weights"),
        (BIAS, unpooled, "files.pooled-biases"),
    ],
)
def test_wrong_heads(pair: tuple[Path, Path], name: str, damage: Callable[[Tensor], Tensor], red: str) -> None:
    source, output = pair
    shape = load_file(output / SINGLE)[name].shape
    edit_tensors(output, {name: damage(heads(source, name)).reshape(shape).to(torch.bfloat16)})
    rehash(output)
    assert failed(source, output) == {red}


def test_a_sound_conversion_passes(pair: tuple[Path, Path]) -> None:
    assert failed(*pair) == set()
    assert failed(pair[1]) == set()


def flip_a_bit(output: Path) -> None:
    """Change the lowest bit of the last byte of the last norm."""
    tensors = load_file(output / SINGLE)
    norm = tensors["model.norm.weight"].view(torch.int16)
    norm[-1] ^= 1
    save_file(tensors, output / SINGLE, metadata={"format": "pt"})


def test_one_flipped_bit(pair: tuple[Path, Path]) -> None:
    source, output = pair
    flip_a_bit(output)
    assert failed(source, output) == {"files.untouched", "files.hashes"}
    rehash(output)
    assert failed(source, output) == {"files.untouched"}


def test_stale_shard(pair: tuple[Path, Path]) -> None:
    """The same values from another run, whose file is another; then one of another method."""
    source, output = pair
    save_file(load_file(output / SINGLE), output / SINGLE, metadata={"format": "pt", "run": "earlier"})
    assert failed(source, output) == {"files.hashes"}
    first = convert(source, output.parent / "first", "--kv-heads", TARGET, "--method", "first")
    shutil.copy(first / SINGLE, output / SINGLE)
    assert failed(source, output) == {"files.hashes", "files.pooled-weights", "files.pooled-biases"}


@pytest.mark.parametrize(
    "change", [{"num_key_value_heads": 3}, {"head_dim": 5}, {"rope_theta": 5.0}, {"tie_word_embeddings": True}]
)
def test_config_edited_without_weights(pair: tuple[Path, Path], change: dict[str, object]) -> None:
    source, output = pair
    edit_config(output, **change)
    red = failed(source, output)
    # A tied output layer is dropped by loaders: that contradicts the stored one as well.
    assert red == {"files.config"} | ({"files.tied-embeddings"} if "tie_word_embeddings" in change else set())


def test_tied_embeddings_conflict(tmp_path: Path) -> None:
    """The source ties its embeddings; the output stores an output layer that differs."""
    source = llama_checkpoint(tmp_path / "source", tied=True)
    output = convert(source, tmp_path / "out", "--kv-heads", TARGET)
    embedding = load_file(output / SINGLE)["model.embed_tokens.weight"]
    edit_tensors(output, {"lm_head.weight": embedding + 1})
    rehash(output)
    assert failed(output) == {"files.tied-embeddings"}
    assert failed(source, output) == {"files.tied-embeddings", "files.tensors"}


def test_lost_tokenizer_file(pair: tuple[Path, Path]) -> None:
    source, output = pair
    (output / "tokenizer.json").unlink()
    assert failed(source, output) == {"files.sidecars"}


@pytest.mark.parametrize("method", ["mean", "first", "random", "subspace", "align"])
def test_every_method_keeps_its_promise(tmp_path: Path, method: str) -> None:
    source = llama_checkpoint(tmp_path / "source", dtype=torch.float32)
    output = convert(source, tmp_path / "out", "--kv-heads", TARGET, "--method", method)
    assert failed(source, output) == set()


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_another_type(pair: tuple[Path, Path], dtype: str) -> None:
    source, output = pair
    assert failed(source, convert(source, output.parent / dtype, "--kv-heads", 1, "--dtype", dtype)) == set()


def test_logits_see_a_wrong_bias_and_a_wrong_config(pair: tuple[Path, Path]) -> None:
    source, output = pair

    def red() -> set[str]:
        report = json.loads(invoke("validate", source, output, "--level", "logits", "--json").stdout)
        return {check["name"] for check in report["checks"] if check["status"] == "failed"}

    assert red() == set()
    kept = (output / "config.json").read_bytes()
    edit_config(output, rms_norm_eps=0.5)
    assert red() == {"files.config", "logits.prefill", "logits.decode"}
    (output / "config.json").write_bytes(kept)
    found = heads(source, BIAS)[0::SHARE].reshape(-1)
    edit_tensors(output, {BIAS.replace("k_proj", "v_proj"): found.to(torch.bfloat16) + 3})
    assert {"files.pooled-biases", "logits.prefill", "logits.decode"} <= red()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", ["mean"]), ("method", None), ("dtype", {}), ("dtype", "bfloat16"), ("family", 5), ("refine", []),
        ("num_key_value_heads", "2"), ("num_key_value_heads", 3), ("grouping", 1), ("calibration", 7),
    ],
)  # fmt: skip
def test_edited_recipe(pair: tuple[Path, Path], field: str, value: object) -> None:
    source, output = pair
    record = read_json(output / "gqaconvert.json")
    record["recipe"][field] = value
    write_json(output / "gqaconvert.json", record)
    assert failed(source, output) == {"files.record"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"recipe": 1, "shards": [], "source": 2, "result": null}'])
def test_damaged_record(pair: tuple[Path, Path], text: str) -> None:
    """One that is there and says nothing is no missing one."""
    source, output = pair
    (output / "gqaconvert.json").write_text(text)
    assert failed(source, output) == {"files.record"}
    assert failed(output) == {"files.record"}
    (output / "gqaconvert.json").unlink()
    assert failed(source, output) == set()


def test_lost_index(tmp_path: Path) -> None:
    """A source is converted without it; loaders find nothing in an output without it."""
    source = llama_checkpoint(tmp_path / "source", shards=2)
    output = convert(source, tmp_path / "out", "--kv-heads", TARGET)
    (output / "model.safetensors.index.json").unlink()
    assert failed(source, output) == {"files.index"}


def test_not_converted(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """A copy of the source is no conversion; a record that claims one makes its shapes wrong."""
    source, output = pair
    assert "it is no conversion" in fails(2, "validate", source, shutil.copytree(source, tmp_path / "copy"))
    shutil.copy(source / SINGLE, output / SINGLE)
    rehash(output)
    assert failed(source, output) == {"files.shapes"}


def test_cut_shard(pair: tuple[Path, Path]) -> None:
    source, output = pair
    with (output / SINGLE).open("r+b") as file:
        file.truncate((output / SINGLE).stat().st_size - 1)
    assert "is cut off" in fails(2, "validate", source, output, "--level", "files")
