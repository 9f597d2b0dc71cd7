"""The arithmetic of a conversion against exact rationals, and against copies that must come back bit for bit."""

import json
import math
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.support.checkpoints import llama_checkpoint, write_safetensors
from tests.support.runs import (
    SINGLE,
    convert,
    edit_config,
    edit_tensors,
    fails,
    raw_tensors,
    read_json,
    read_tensors,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
PRECISION = {torch.bfloat16: (8, -126, 127), torch.float16: (11, -14, 15), torch.float32: (24, -126, 127)}
"""Bits of the significand, least and largest exponent (IEEE 754-2019, table 3.5; bfloat16: float32 cut off)."""
K, V = "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.v_proj"


def rounded(value: Fraction, dtype: torch.dtype) -> float:
    """The nearest number of a binary format, ties to even, subnormals included, by exact integer arithmetic."""
    precision, least, largest = PRECISION[dtype]
    if value == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(value.numerator))) - math.floor(math.log2(value.denominator))
    while Fraction(2) ** exponent > abs(value):
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= abs(value):
        exponent += 1
    unit = Fraction(2) ** (max(exponent, least) - precision + 1)
    nearest = round(value / unit) * unit  # Python rounds halves to even
    assert abs(nearest) < Fraction(2) ** (largest + 1), "overflow"
    return float(nearest)


def exact_mean(heads: Tensor, dtype: torch.dtype) -> Tensor:
    """Mean over the first axis, exact, rounded once."""
    columns = [[Fraction(value) for value in column] for column in heads.double().flatten(1).T.tolist()]
    means = [rounded(sum(column, Fraction()) / len(column), dtype) for column in columns]
    return torch.tensor(means, dtype=torch.float64).to(dtype).reshape(heads.shape[1:])


def by_head(tensor: Tensor, *sizes: int) -> Tensor:
    """The first axis split into several."""
    return tensor.reshape(*sizes, *tensor.shape[1:])


def grouped(tensor: Tensor, groups: int, size: int, head_dim: int) -> Tensor:
    """(groups * size * head_dim, ...) -> (size, groups, head_dim, ...): heads of one group along the first axis."""
    return by_head(tensor, groups, size, head_dim).transpose(0, 1)


def pool_columns(folder: Path, columns: Iterable[Iterable[float]], dtype: torch.dtype, *options: object) -> Tensor:
    """Convert a model whose K heads, taken together, hold each column's values at one place; return its only K head."""
    values = torch.tensor([list(column) for column in columns], dtype=torch.float64).T.contiguous()
    heads, width = values.shape
    hidden = 4
    rows = -(-width // hidden)
    padded = torch.zeros((heads, rows * hidden), dtype=torch.float64)
    padded[:, :width] = values
    stored = padded.to(dtype)
    assert torch.equal(stored.double(), padded), "the test's own values must be representable"
    source = folder / "source"
    llama_checkpoint(source, layers=1, hidden=hidden, heads=heads, kv_heads=heads, head_dim=rows, vocab=8)
    edit_tensors(source, {f"{K}.weight": stored.reshape(heads * rows, hidden)})
    pooled = read_tensors(convert(source, folder / "target", "--mqa", *options))[f"{K}.weight"]
    return pooled.flatten()[:width]


# ---- Copies come back


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 16])
def test_repeated_heads_come_back_bit_for_bit(tmp_path: Path, size: int, dtype: torch.dtype) -> None:
    groups, head_dim, hidden = 2, 4, 12
    few = {"layers": 2, "hidden": hidden, "heads": groups * size, "head_dim": head_dim, "bias": True, "vocab": 16}
    grouped_query = llama_checkpoint(tmp_path / "gqa", kv_heads=groups, **few)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(size)
    truth = {
        # Drawn anew: the helper's float32 values would leave half of a float64 empty.
        name: torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, tensor in read_tensors(grouped_query).items()
    }
    many = {
        name: by_head(tensor, groups, head_dim).repeat_interleave(size, 0).flatten(0, 1)
        if "k_proj" in name or "v_proj" in name
        else tensor
        for name, tensor in truth.items()
    }
    source = llama_checkpoint(tmp_path / "mha", kv_heads=groups * size, **few)  # type: ignore[arg-type]
    write_safetensors(source / SINGLE, many)
    back = read_tensors(convert(source, tmp_path / "back", "--kv-heads", groups))
    assert back.keys() == truth.keys()
    for name, tensor in truth.items():
        assert back[name].dtype == dtype
        assert back[name].shape == tensor.shape, name
        assert back[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name


def test_heads_that_are_tiled_do_not_come_back(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "mha", heads=6, kv_heads=6, head_dim=8, layers=1)
    heads = torch.randn((2, 8, 36), generator=torch.Generator().manual_seed(0))
    tiled = heads.repeat(3, 1, 1)  # 0 1 0 1 0 1: query head h would read KV head h % 2
    edit_tensors(source, {f"{K}.weight": tiled.flatten(0, 1)})
    back = read_tensors(convert(source, tmp_path / "back", "--kv-heads", 2))[f"{K}.weight"]
    assert not torch.allclose(back, heads.flatten(0, 1), atol=0.1)
    assert by_head(back, 2, 8).equal(exact_mean(by_head(tiled, 2, 3).transpose(0, 1), torch.float32))


@pytest.mark.parametrize(("heads", "few", "many"), [(12, 3, 6), (12, 4, 12), (7, 1, 7), (12, 2, 6)])
def test_expanding_repeats_heads_and_pooling_undoes_it(tmp_path: Path, heads: int, few: int, many: int) -> None:
    source = llama_checkpoint(
        tmp_path / "few", heads=heads, kv_heads=few, head_dim=4, bias=True, dtype=torch.bfloat16, layers=2
    )
    expanded = convert(source, tmp_path / "many", "--kv-heads", many)
    before, after = read_tensors(source), read_tensors(expanded)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        wanted = tensor
        if "k_proj" in name or "v_proj" in name:
            wanted = by_head(tensor, few, 4).repeat_interleave(many // few, 0).flatten(0, 1)
        assert after[name].equal(wanted), name
    assert read_json(expanded / "config.json")["num_key_value_heads"] == many
    assert raw_tensors(convert(expanded, tmp_path / "back", "--kv-heads", few)) == raw_tensors(source)


def test_expanding_carries_nan_along(tmp_path: Path) -> None:
    """Repeating a head copies bytes; what they mean is not its business."""
    source = llama_checkpoint(tmp_path / "few", heads=4, kv_heads=2, head_dim=4, layers=1)
    weight = read_tensors(source)[f"{V}.weight"]
    weight[0, 0], weight[-1, -1] = math.nan, math.inf
    edit_tensors(source, {f"{V}.weight": weight})
    after = read_tensors(convert(source, tmp_path / "many", "--kv-heads", 4))[f"{V}.weight"]
    wanted = by_head(weight, 2, 4).repeat_interleave(2, 0).flatten(0, 1)
    assert after.view(torch.int32).equal(wanted.view(torch.int32))


# ---- The mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize(("heads", "kv_heads", "target"), [(6, 6, 2), (6, 6, 3), (7, 7, 1), (12, 6, 2)])
def test_mean_is_exact_and_rounded_once(
    tmp_path: Path, heads: int, kv_heads: int, target: int, dtype: torch.dtype
) -> None:
    source = llama_checkpoint(
        tmp_path / "source", heads=heads, kv_heads=kv_heads, head_dim=4, hidden=16, bias=True, dtype=dtype, layers=2
    )
    before, after = read_tensors(source), read_tensors(convert(source, tmp_path / "target", "--kv-heads", target))
    for name in before:
        if "k_proj" in name or "v_proj" in name:
            wanted = exact_mean(grouped(before[name], target, kv_heads // target, 4), dtype).flatten(0, 1)
            assert after[name].equal(wanted), name


def test_mean_of_float64_is_good_to_its_last_bits(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    columns = torch.randn((200, 5), generator=generator, dtype=torch.float64)
    pooled = pool_columns(tmp_path, columns.tolist(), torch.float64)
    for found, column in zip(pooled.tolist(), columns.tolist(), strict=True):
        exact = sum(map(Fraction, column), Fraction()) / 5
        bound = 4 * Fraction(math.ulp(max(map(abs, column))))
        assert abs(Fraction(found) - exact) <= bound


BFLOAT16_TRAPS = [
    # A tie but for less than half a unit of float32: through float32 it becomes a tie, and goes the wrong way.
    ([2, 2 + 2**-6, 2**-30, 0], 1 + 2**-7),
    ([2, 2 + 2**-6, -(2**-30), 0], 1),
    ([2 + 2**-6, 2 + 2**-5, -(2**-30), 0], 1 + 2**-7),
    ([2 + 2**-6, 2 + 2**-5, 2**-30, 0], 1 + 2**-6),
    ([-2, -2 - 2**-6, -(2**-30), 0], -1 - 2**-7),
    # Real ties go to even.
    ([2, 2 + 2**-6, 0, 0], 1),
    ([2 + 2**-6, 2 + 2**-5, 0, 0], 1 + 2**-6),
    # Subnormals: the smallest is 2^-133.
    ([2**-133, 2**-133, 2**-133, 0], 2**-133),
    ([2**-133, 2**-133, 0, 0], 0),
    ([2**-132, 2**-132, 2**-132, 0], 2**-132),
    ([2**-131, 2**-133, 2**-133, 0], 2**-132),
    ([2**-133, 2**-133, 2**-133, 2**-133], 2**-133),
    ([2**-126, 2**-126, 2**-126, 2**-126 - 2**-133], 2**-126),
]
FLOAT16_TRAPS = [
    ([2, 2 + 2**-9, 2**-24, 0], 1 + 2**-10),
    ([2, 2 + 2**-9, -(2**-24), 0], 1),
    ([2 + 2**-9, 2 + 2**-8, -(2**-24), 0], 1 + 2**-10),
    ([2 + 2**-9, 2 + 2**-8, 2**-24, 0], 1 + 2**-9),
    ([-2, -2 - 2**-9, -(2**-24), 0], -1 - 2**-10),
    ([2, 2 + 2**-9, 0, 0], 1),
    # Subnormals: the smallest is 2^-24.
    ([2**-24, 2**-24, 2**-24, 0], 2**-24),
    ([2**-24, 2**-24, 0, 0], 0),
    ([2**-22, 2**-24, 2**-24, 0], 2**-23),
    ([65504, 65504, 65504, 65504], 65504),
]


@pytest.mark.parametrize(
    ("dtype", "traps"), [(torch.bfloat16, BFLOAT16_TRAPS), (torch.float16, FLOAT16_TRAPS)], ids=["bf16", "f16"]
)
def test_mean_does_not_round_twice(tmp_path: Path, dtype: torch.dtype, traps: list[tuple[list[float], float]]) -> None:
    pooled = pool_columns(tmp_path, [column for column, _ in traps], dtype)
    for (column, wanted), found in zip(traps, pooled.tolist(), strict=True):
        assert wanted == rounded(sum(map(Fraction, column), Fraction()) / 4, dtype), "the test's own table"
        assert found == wanted, column


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "f16"])
@pytest.mark.parametrize("size", [3, 5, 8])
def test_mean_of_every_size_of_number_is_rounded_once(tmp_path: Path, size: int, dtype: torch.dtype) -> None:
    """Exponents within 20 of each other, from deep in the subnormals to near the top."""
    generator = torch.Generator().manual_seed(size)
    _, least, largest = PRECISION[dtype]
    base = torch.randint(least - 8, largest - 22, (2000, 1), generator=generator)
    exponent = base + torch.randint(0, 20, (2000, size), generator=generator)
    values = torch.randn((2000, size), generator=generator, dtype=torch.float64).clamp(-2, 2) * 2.0**exponent
    columns = values.to(dtype).double()
    pooled = pool_columns(tmp_path, columns.tolist(), dtype)
    assert pooled.equal(exact_mean(columns.T, dtype))


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from([torch.bfloat16, torch.float16]),
    st.integers(2, 6).flatmap(
        lambda size: st.lists(
            st.lists(st.integers(-(2**12), 2**12), min_size=size, max_size=size), min_size=1, max_size=16
        )
    ),
)
def test_mean_of_small_integers_is_rounded_once(
    tmp_path_factory: pytest.TempPathFactory, dtype: torch.dtype, columns: list[list[int]]
) -> None:
    stored = torch.tensor(columns, dtype=torch.float64).to(dtype).double()
    pooled = pool_columns(tmp_path_factory.mktemp("integers"), stored.tolist(), dtype)
    assert pooled.equal(exact_mean(stored.T, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "f16", "f32"])
def test_a_new_type_and_a_mean_are_one_rounding(tmp_path: Path, dtype: torch.dtype) -> None:
    """From float64 with --dtype: neither the pooled tensors nor those that are only cast may round twice."""
    name = str(dtype).removeprefix("torch.")
    precision, _, _ = PRECISION[dtype]
    half = 2.0**-precision
    values = [1 + half + 2**-50, 1 + half - 2**-50, 1 + 3 * half - 2**-50, 1 + half, 1 + 3 * half, -1 - half - 2**-50]
    source = llama_checkpoint(tmp_path / "source", layers=1, heads=2, kv_heads=2, head_dim=4, hidden=6)
    tensors = {key: tensor.double() for key, tensor in read_tensors(source).items()}
    tensors["model.norm.weight"] = torch.tensor(values, dtype=torch.float64)
    tensors[f"{K}.weight"] = torch.tensor(values, dtype=torch.float64).expand(8, 6).contiguous()
    write_safetensors(source / SINGLE, tensors)
    after = read_tensors(convert(source, tmp_path / "target", "--mqa", "--dtype", name))
    wanted = [rounded(Fraction(value), dtype) for value in values]
    assert after["model.norm.weight"].tolist() == wanted
    assert after[f"{K}.weight"].tolist() == [wanted] * 4
    assert {tensor.dtype for tensor in after.values()} == {dtype}


# ---- Other methods


def test_first_takes_the_first_head_of_each_group(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", heads=6, kv_heads=6, head_dim=8, bias=True, dtype=torch.bfloat16)
    before = read_tensors(source)
    after = read_tensors(convert(source, tmp_path / "target", "--kv-heads", 2, "--method", "first"))
    for name, tensor in before.items():
        wanted = tensor
        if "k_proj" in name or "v_proj" in name:
            wanted = torch.cat([tensor[0:8], tensor[24:32]])  # heads 0 and 3 of 6
        assert after[name].equal(wanted), name


def random_heads(source: Path, target: Path, seed: int | None) -> dict[str, Tensor]:
    options = () if seed is None else ("--seed", seed)
    return read_tensors(convert(source, target, "--kv-heads", 2, "--method", "random", *options))


def test_random_heads(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", heads=8, kv_heads=8, head_dim=16, hidden=128, bias=True, layers=2)
    edit_config(source, initializer_range=0.05)
    one = random_heads(source, tmp_path / "one", 1)
    again, other = random_heads(source, tmp_path / "again", 1), random_heads(source, tmp_path / "other", 2)
    drawn = [name for name in one if name.endswith(("k_proj.weight", "v_proj.weight"))]
    assert len(drawn) == 4
    for name in drawn:
        assert one[name].equal(again[name])
        assert not torch.isclose(one[name], other[name]).any(dim=1).all()
        # 4,096 values: the standard error of their std is 1.1%, of their mean 0.0008.
        assert abs(one[name].std().item() / 0.05 - 1) < 0.06
        assert abs(one[name].mean().item()) < 0.004
    everything = [by_head(one[name], 2, 16) for name in drawn]
    heads = torch.cat(everything).flatten(1)
    correlation = torch.corrcoef(heads).fill_diagonal_(0)
    assert correlation.abs().max() < 0.12, "K and V, layers and heads are drawn independently"
    for name, tensor in one.items():
        if name.endswith(("k_proj.bias", "v_proj.bias")):
            assert tensor.equal(torch.zeros(32))
        elif name not in drawn:
            assert tensor.equal(read_tensors(source)[name]), name


def test_random_uses_the_stock_initializer_range_where_the_config_is_silent(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", heads=8, kv_heads=8, head_dim=16, hidden=128, layers=1)
    edit_config(source, "initializer_range")
    assert abs(random_heads(source, tmp_path / "target", None)[f"{K}.weight"].std().item() / 0.02 - 1) < 0.06


def test_an_unknown_method_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source")
    message = fails(2, "convert", source, tmp_path / "target", "--mqa", "--method", "meen")
    assert "meen" in message
    assert "mean" in message
    assert "first" in message
    assert "random" in message


# ---- Norms of keys


def wide_norm_checkpoint(folder: Path, dtype: torch.dtype) -> Path:
    """OLMo 2: the norm of K spans all KV heads, with a weight for each."""
    llama_checkpoint(folder, heads=6, kv_heads=6, head_dim=8, layers=2, dtype=dtype)
    edit_config(folder, model_type="olmo2", architectures=["Olmo2ForCausalLM"])
    generator = torch.Generator().manual_seed(4)
    norms = {
        f"model.layers.{layer}.self_attn.{name}.weight": (1 + torch.randn(48, generator=generator) / 4).to(dtype)
        for layer in range(2)
        for name in ("q_norm", "k_norm")
    }
    edit_tensors(folder, norms)
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_key_norm_that_spans_the_heads_is_pooled_like_them(tmp_path: Path, dtype: torch.dtype) -> None:
    source = wide_norm_checkpoint(tmp_path / "source", dtype)
    before, after = read_tensors(source), read_tensors(convert(source, tmp_path / "target", "--kv-heads", 2))
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.k_norm.weight"
        assert after[name].equal(exact_mean(grouped(before[name], 2, 3, 8), dtype).flatten())
        name = name.replace("k_norm", "q_norm")
        assert after[name].equal(before[name])
    expanded = convert(tmp_path / "target", tmp_path / "expanded", "--kv-heads", 6)
    name = "model.layers.0.self_attn.k_norm.weight"
    assert read_tensors(expanded)[name].equal(by_head(after[name], 2, 8).repeat_interleave(3, 0).flatten())


# ---- Values that are not numbers


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", [f"{K}.weight", f"{V}.bias"])
def test_a_pooled_head_that_is_not_finite_is_refused(tmp_path: Path, name: str, value: float) -> None:
    source = llama_checkpoint(tmp_path / "source", bias=True)
    tensor = read_tensors(source)[name]
    tensor.view(-1)[-1] = value
    edit_tensors(source, {name: tensor})
    message = fails(2, "convert", source, tmp_path / "target", "--kv-heads", 2)
    assert name in message
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_nan_in_what_is_only_copied_is_carried(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source")
    name = "model.layers.1.mlp.up_proj.weight"
    tensor = read_tensors(source)[name]
    tensor[3] = math.nan
    edit_tensors(source, {name: tensor})
    target = convert(source, tmp_path / "target", "--kv-heads", 2)
    assert raw_tensors(target)[name] == raw_tensors(source)[name]


@pytest.mark.parametrize("name", [f"{K}.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_value_that_the_new_type_cannot_hold_is_refused(tmp_path: Path, name: str) -> None:
    source = llama_checkpoint(tmp_path / "source")
    tensor = read_tensors(source)[name]
    tensor[0] = 70000.0
    tensor[8] = 70000.0
    tensor[16] = 70000.0
    edit_tensors(source, {name: tensor})
    message = fails(2, "convert", source, tmp_path / "target", "--kv-heads", 2, "--dtype", "float16")
    assert name in message
    assert "float16" in message
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


# ---- Counts


@pytest.mark.parametrize(
    ("heads", "kv_heads", "asked", "legal"),
    [
        (12, 12, 5, [1, 2, 3, 4, 6]),
        (12, 12, 24, [1, 2, 3, 4, 6]),
        (12, 6, 4, [1, 2, 3, 12]),  # 4 divides the query heads, and neither divides 6 nor is a multiple of it
        (12, 6, 6, [1, 2, 3, 12]),
        (7, 7, 3, [1]),
        (12, 12, 0, [1, 2, 3, 4, 6]),
        (12, 12, -2, [1, 2, 3, 4, 6]),
    ],
)
def test_an_impossible_count_is_refused_with_the_possible_ones(
    tmp_path: Path, heads: int, kv_heads: int, asked: int, legal: list[int]
) -> None:
    source = llama_checkpoint(tmp_path / "source", heads=heads, kv_heads=kv_heads, head_dim=4, layers=1)
    message = fails(2, "convert", source, tmp_path / "target", "--kv-heads", asked)
    assert str(asked) in message
    assert ", ".join(map(str, legal)) in message
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_every_possible_count_is_offered_and_works(tmp_path: Path) -> None:
    """A count is possible if it divides the query heads, and divides or is divided by the present count."""
    heads, kv_heads = 12, 6
    source = llama_checkpoint(tmp_path / "source", heads=heads, kv_heads=kv_heads, head_dim=4, layers=1)
    for count in range(1, 14):
        possible = heads % count == 0 and (kv_heads % count == 0 or count % kv_heads == 0) and count != kv_heads
        if not possible:
            fails(2, "convert", source, tmp_path / str(count), "--kv-heads", count)
            continue
        target = convert(source, tmp_path / str(count), "--kv-heads", count)
        assert read_tensors(target)[f"{K}.weight"].shape == (count * 4, 36)
        assert json.loads((target / "config.json").read_text())["num_key_value_heads"] == count
