"""For every family and K/V-head count: the converted checkpoint computes what pooled K/V heads must compute.

The source is saved by the stock class, converted by the real command, and loaded by the stock class again.
It is compared with `reference.expanded_reference`: the source model with each K/V head overwritten by its
group's mean. The stock class computes both, so a difference can only come from the conversion.

Set GQACONVERT_FAMILY_TABLE to a path to get the measured differences as a Markdown table.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner, Result

from gqaconvert.cli.app import app
from tests.families.cases import CASES, VOCABULARY, Case, tensors_of
from tests.families.reference import QUERY_HEADS, expanded_reference, key_and_value_exchanged, strided

# Relative to the largest logit of the reference (15 to 90 here), and absolute where that is below 1. The
# converted model and the reference do the same float32 arithmetic in matrices of other widths, so only the
# order of sums may differ. The wrong models used as controls miss by a tenth of the largest logit and more.
TOLERANCE = 1e-5
CONTROL = 1e-2
NEW_TOKENS = 8
TOKENS = torch.randint(VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(0))

PAIRS = [pytest.param((case, target), id=f"{case.name}-{target}") for case in CASES for target in case.targets]
REFUSED = [pytest.param(case, target, id=f"{case.name}-{target}") for case in CASES for target in case.refused]


@dataclass(frozen=True)
class Source:
    """A stock model and the folder it was saved to."""

    model: PreTrainedModel
    folder: Path


@dataclass(frozen=True)
class Conversion:
    """One source converted to one K/V-head count, with everything that the tests compare."""

    case: Case
    target: int
    source: Source
    folder: Path
    model: PreTrainedModel
    loading: dict[str, Any]
    reference: PreTrainedModel

    @property
    def pools(self) -> bool:
        """Whether heads are merged; otherwise they are repeated and nothing may change."""
        return self.target < self.case.kv_heads


@dataclass(frozen=True)
class Row:
    """One line of the table of differences."""

    case: Case
    target: int
    largest_logit: float
    difference: float
    control: float


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small only lose time to threads that wait for each other: tenfold where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Source]:
    """Stock models by case name, built and saved when first asked for."""
    root = tmp_path_factory.mktemp("families")

    class Saved(dict[str, Source]):
        def __missing__(self, name: str) -> Source:
            model = next(case for case in CASES if case.name == name).build()
            model.save_pretrained(root / name)
            return self.setdefault(name, Source(model, root / name))

    return Saved()


@pytest.fixture(scope="module")
def conversion(
    request: pytest.FixtureRequest, sources: dict[str, Source], tmp_path_factory: pytest.TempPathFactory
) -> Conversion:
    """The pair of case and target under test, converted once for all tests of it."""
    case, target = request.param
    source = sources[case.name]
    folder = tmp_path_factory.mktemp("converted") / f"{case.name}-{target}"
    result = _convert(source.folder, folder, target)
    assert result.exit_code == 0, f"exit code {result.exit_code}: {result.output} {result.exception!r}"
    auto: Any = AutoModelForCausalLM  # its methods are not annotated
    model, loading = auto.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
    reference = source.model
    if target < case.kv_heads:
        reference = expanded_reference(source.model, case.layout, case.kv_heads, target)
    return Conversion(case, target, source, folder, model.eval(), loading, reference)


@pytest.fixture(scope="session")
def family_table() -> Iterator[list[Row]]:
    """Rows of the table, written at the end if GQACONVERT_FAMILY_TABLE names a file."""
    rows: list[Row] = []
    yield rows
    path = os.environ.get("GQACONVERT_FAMILY_TABLE")
    if path:
        Path(path).write_text(_table(rows), encoding="utf-8")


def test_case_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("conversion", PAIRS, indirect=True)
def test_stock_class_loads_every_tensor(conversion: Conversion) -> None:
    loading = conversion.loading
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not loading[problem], f"{problem}: {loading[problem]}"
    assert type(conversion.model) is type(conversion.source.model)
    assert {parameter.dtype for parameter in conversion.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("conversion", PAIRS, indirect=True)
def test_logits_are_those_of_the_pooled_heads(conversion: Conversion, family_table: list[Row]) -> None:
    case, target = conversion.case, conversion.target
    logits = _logits(conversion.model)
    expected = _logits(conversion.reference)
    largest = expected.abs().max().item()
    difference = (logits - expected).abs().max().item()
    controls = {"K and V exchanged": key_and_value_exchanged(conversion.reference, case.layout, case.kv_heads)}
    if conversion.pools:
        controls["heads not pooled"] = conversion.source.model
    if 1 < target < case.kv_heads:
        controls["strided groups"] = expanded_reference(
            conversion.source.model, case.layout, case.kv_heads, target, strided
        )
    distances = {name: (logits - _logits(model)).abs().max().item() for name, model in controls.items()}
    family_table.append(Row(case, target, largest, difference, min(distances.values())))

    assert torch.isfinite(expected).all()
    assert difference <= TOLERANCE * max(1.0, largest)
    for name, distance in distances.items():
        assert distance > CONTROL * max(1.0, largest), f"{name} would pass as well"


@pytest.mark.parametrize("conversion", PAIRS, indirect=True)
def test_greedy_generation_with_cache(conversion: Conversion) -> None:
    produced = _generate(conversion.model)
    assert produced.shape == (TOKENS.shape[0], TOKENS.shape[1] + NEW_TOKENS)
    assert produced.tolist() == _generate(conversion.reference).tolist()


@pytest.mark.parametrize("conversion", PAIRS, indirect=True)
def test_cache_holds_the_pooled_heads(conversion: Conversion) -> None:
    case, target = conversion.case, conversion.target
    distinct_heads = min(target, case.kv_heads)
    cached, expected = _cache(conversion.model), _cache(conversion.reference)
    layers = case.attention_layers or conversion.model.config.num_hidden_layers
    assert len(cached) == len(expected) == 2 * layers
    for tensor, reference in zip(cached, expected, strict=True):
        assert tensor.shape[1] == target
        heads = tensor.repeat_interleave(QUERY_HEADS // tensor.shape[1], dim=1)
        pooled = reference.repeat_interleave(QUERY_HEADS // reference.shape[1], dim=1)
        assert (heads - pooled).abs().max() <= TOLERANCE * max(1.0, pooled.abs().max().item())
        first = heads[:, :: QUERY_HEADS // distinct_heads].transpose(0, 1).flatten(1)
        assert torch.pdist(first).gt(CONTROL).all()


@pytest.mark.parametrize("conversion", PAIRS, indirect=True)
def test_nothing_but_keys_and_values_changes(conversion: Conversion) -> None:
    before, after = tensors_of(conversion.source.folder), tensors_of(conversion.folder)
    may_change = re.compile(conversion.case.may_change)
    kept = {name for name in before if not may_change.search(name)}
    assert kept
    assert kept == {name for name in after if not may_change.search(name)}
    for name in kept:
        assert torch.equal(before[name], after[name]), name
    assert {name for name in after if name not in before} == set()

    config_before = json.loads((conversion.source.folder / "config.json").read_text(encoding="utf-8"))
    config_after = json.loads((conversion.folder / "config.json").read_text(encoding="utf-8"))
    keys = {*config_before, *config_after}
    changed = {key for key in keys if config_before.get(key) != config_after.get(key)}
    assert changed <= conversion.case.config_keys
    if conversion.case.config_keys == {"num_key_value_heads"}:
        assert config_after["num_key_value_heads"] == conversion.target


@pytest.mark.parametrize("conversion", PAIRS, indirect=True)
def test_validate_finds_nothing_wrong(conversion: Conversion) -> None:
    """The files level recomputes every merged head by code of its own."""
    arguments = ["validate", str(conversion.source.folder), str(conversion.folder), "--level", "files"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(("case", "target"), REFUSED)
def test_impossible_targets_are_refused(case: Case, target: int, sources: dict[str, Source], tmp_path: Path) -> None:
    destination = tmp_path / "converted"
    result = _convert(sources[case.name].folder, destination, target)
    assert result.exit_code == 2, f"{result.output} {result.exception!r}"
    assert "error:" in result.stderr
    assert not destination.exists()


def _convert(source: Path, destination: Path, kv_heads: int) -> Result:
    arguments = ["convert", str(source), str(destination), "--kv-heads", str(kv_heads), "--quiet"]
    return CliRunner().invoke(app, arguments)


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Tensor:
    logits: Tensor = model(TOKENS, use_cache=False).logits
    return logits


@torch.no_grad()
def _generate(model: PreTrainedModel) -> Tensor:
    stock: Any = model  # the class mixes generation in at run time
    produced: Tensor = stock.generate(
        TOKENS,
        attention_mask=torch.ones_like(TOKENS),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        use_cache=True,
    )
    return produced


@torch.no_grad()
def _cache(model: PreTrainedModel) -> list[Tensor]:
    """Return the cached K and V of every layer, each (batch, heads, tokens, head_dim)."""
    layers = model(TOKENS, use_cache=True).past_key_values.layers
    kept = [layer for layer in layers if getattr(layer, "keys", None) is not None]
    return [tensor for layer in kept for tensor in (layer.keys, layer.values)]


def _table(rows: list[Row]) -> str:
    lines = [
        "| case | model_type | K/V heads | largest logit | largest difference | nearest wrong model |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.case.name} | {row.case.model_type} | {row.case.kv_heads} -> {row.target} "
        f"| {row.largest_logit:.1f} | {row.difference:.1e} | {row.control:.2g} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"
