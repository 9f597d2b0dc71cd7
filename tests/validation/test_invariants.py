"""Merges of whole attention modules: sound ones pass, and each thing that must hold of them is broken once by hand."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.families.cases import CASES, Case
from tests.support.checkpoints import llama_checkpoint
from tests.support.runs import SINGLE, convert, edit_tensors
from tests.validation.test_mutations import failed, rehash

ROOT = Path(__file__).parents[2]
HEADS, TARGET, DIM = 6, 2, 8
LAYER = "model.layers.1.self_attn."
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module", params=["subspace", "align"])
def sound(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """(method, source, output), 6 KV heads to 2, with biases."""
    folder = tmp_path_factory.mktemp(request.param)
    source = llama_checkpoint(folder / "source", dtype=torch.bfloat16, bias=True)
    return request.param, source, convert(source, folder / "out", "--kv-heads", TARGET, "--method", request.param)


def test_sound_merges_pass(sound: tuple[str, Path, Path]) -> None:
    assert failed(sound[1], sound[2]) == set()


def first_key(source: Tensors, output: Tensors) -> None:
    """In the span of the group's heads, but not their best shared head."""
    output["k_proj.weight"][:DIM] = source["k_proj.weight"][:DIM]


def first_value(source: Tensors, output: Tensors) -> None:
    output["v_proj.weight"][:DIM] = source["v_proj.weight"][:DIM]


def noisy_value(source: Tensors, output: Tensors) -> None:
    """A twentieth of noise, most of it outside the space of the group's heads."""
    value = output["v_proj.weight"]
    value += 0.05 * value.abs().mean() * torch.randn(value.shape, generator=torch.Generator().manual_seed(0))


def swapped_outputs(source: Tensors, output: Tensors) -> None:
    """Two heads of O in each other's place."""
    columns = output["o_proj.weight"].view(-1, HEADS, DIM)
    columns[:, [0, 1]] = columns[:, [1, 0]]


def swapped_queries(source: Tensors, output: Tensors) -> None:
    """Weights and biases of two heads of Q in each other's place."""
    for leaf in ("weight", "bias"):
        rows = output[f"q_proj.{leaf}"].view(HEADS, -1)
        rows[[0, 1]] = rows[[1, 0]]


def source_queries(source: Tensors, output: Tensors) -> None:
    """K merged, and its changes of basis not folded into Q."""
    for leaf in ("weight", "bias"):
        output[f"q_proj.{leaf}"].copy_(source[f"q_proj.{leaf}"])


def wrong_rotary_layout(source: Tensors, output: Tensors) -> None:
    """K and Q turned alike, which changes no score but where positions come in: by pairs (2i, 2i + 1) here."""
    turn = torch.kron(torch.eye(DIM // 2), torch.tensor([[0.6, -0.8], [0.8, 0.6]]))
    for name, heads in (("q_proj", HEADS), ("k_proj", TARGET)):
        for leaf in ("weight", "bias"):
            rows = output[f"{name}.{leaf}"]
            rows.copy_((turn @ rows.float().view(heads, DIM, -1)).reshape(rows.shape))


def louder_key(source: Tensors, output: Tensors) -> None:
    for leaf in ("weight", "bias"):
        output[f"k_proj.{leaf}"][DIM:] *= 1.25


def shifted_energy(source: Tensors, output: Tensors) -> None:
    """V halved and O doubled: the function stays, the normalisation of the method does not."""
    for leaf in ("weight", "bias"):
        output[f"v_proj.{leaf}"][:DIM] /= 2
    output["o_proj.weight"][:, : HEADS // TARGET * DIM] *= 2


def quieter_value(source: Tensors, output: Tensors) -> None:
    for leaf in ("weight", "bias"):
        output[f"v_proj.{leaf}"][:DIM] /= 2


def query_bias_left(source: Tensors, output: Tensors) -> None:
    output["q_proj.bias"].copy_(source["q_proj.bias"])


def first_bias(name: str) -> Callable[[Tensors, Tensors], None]:
    def damage(source: Tensors, output: Tensors) -> None:
        output[f"{name}.bias"].copy_(source[f"{name}.bias"].view(HEADS, DIM)[:: HEADS // TARGET].flatten())

    return damage


def output_bias(source: Tensors, output: Tensors) -> None:
    """The bias after O has no head: it stays."""
    output["o_proj.bias"] += 1


def nan(source: Tensors, output: Tensors) -> None:
    output["k_proj.weight"][0, 0] = torch.nan


KEYS, VALUES, NORMS, BIASES = (f"files.merged-{name}" for name in ("keys", "values", "norms", "biases"))


@pytest.mark.parametrize(
    ("damage", "subspace", "align"),
    [
        (first_key, {KEYS}, {KEYS}),
        (swapped_queries, {KEYS}, {KEYS}),
        (source_queries, {KEYS}, {KEYS}),
        (wrong_rotary_layout, {KEYS}, {KEYS}),
        (first_value, {VALUES}, {VALUES}),
        (noisy_value, {VALUES}, {VALUES}),
        (swapped_outputs, {VALUES}, {VALUES}),
        (quieter_value, {VALUES}, {NORMS}),
        (louder_key, {NORMS}, {NORMS}),
        (shifted_energy, {NORMS}, {VALUES}),
        (query_bias_left, {BIASES}, {BIASES}),
        (first_bias("k_proj"), {BIASES}, {BIASES}),
        (first_bias("v_proj"), {BIASES}, {BIASES}),
        (output_bias, {"files.untouched"}, {"files.untouched"}),
        (nan, {"files.merged-finite"}, {"files.merged-finite"}),
    ],
)
def test_damage(
    sound: tuple[str, Path, Path],
    tmp_path: Path,
    damage: Callable[[Tensors, Tensors], None],
    subspace: set[str],
    align: set[str],
) -> None:
    method, source, whole = sound
    output = Path(shutil.copytree(whole, tmp_path / "out"))
    before, after = (
        {name.removeprefix(LAYER): tensor for name, tensor in load_file(folder / SINGLE).items() if LAYER in name}
        for folder in (source, output)
    )
    damage(before, after)
    edit_tensors(output, {LAYER + name: tensor for name, tensor in after.items()})
    rehash(output)
    assert failed(source, output) == (subspace if method == "subspace" else align)


STRUCTURES = ("qwen3", "olmo2", "glm", "phi", "phi3", "falcon_new_decoder", "gpt_bigcode_mha")


@pytest.mark.parametrize("case", [case for case in CASES if case.name in STRUCTURES], ids=lambda case: case.name)
def test_other_structures(tmp_path: Path, case: Case) -> None:
    """Norms after K, interleaved and partial rotary embeddings, none, fused projections; calibration is below."""
    case.build().save_pretrained(tmp_path / "source")
    for method in ("subspace", "align"):
        output = convert(tmp_path / "source", tmp_path / method, "--kv-heads", 1, "--method", method)
        assert failed(tmp_path / "source", output) == set()
        tensors = load_file(output / SINGLE)
        name = next(name for name in tensors if re.search(r"(q_proj|qkv_proj|query_key_value|c_attn)\.weight$", name))
        names = [name, *(other for other in (name.replace("weight", "bias"),) if other in tensors)]
        for edited in names:
            tensors[edited][1] += tensors[edited][0]
        edit_tensors(output, {edited: tensors[edited] for edited in names})
        rehash(output)
        assert failed(tmp_path / "source", output) == {KEYS}


def test_calibrated(tmp_path: Path) -> None:
    """The weights of calibration are not in the output: K must still be made of its group's heads, pair by pair."""
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "examples" / "calibration.txt").read_text()[:2400])
    source = ROOT / "examples" / "tiny-llama"
    output = convert(source, tmp_path / "out", "--kv-heads", 2, "--method", "subspace", "--calibrate", text)
    assert failed(source, output) == set()
    tensors = load_file(output / SINGLE)
    name = "model.layers.2.self_attn.k_proj.weight"
    tensors[name][[0, 1]] = tensors[name][[1, 0]]
    edit_tensors(output, {name: tensors[name]})
    rehash(output)
    assert failed(source, output) == {KEYS}
    assert json.loads((output / "gqaconvert.json").read_text())["recipe"]["calibration"] is not None
