"""Methods that rewrite whole attention modules, on every stock class.

Planted: the heads of each group are made equal inside the stock module, so that one head can stand for all of them and
a right merge must compute what the module computes, for every layout, bias, norm and position scheme. With heads as
they are, the result must load strictly and be finite.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from gqaconvert.cli.app import app
from tests.families.cases import CASES, VOCABULARY, Case
from tests.families.reference import expanded_reference

TOKENS = torch.randint(VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(0))
REORDER_REFUSED = {
    "gpt_oss": "sinks",
    "falcon_rw": "position bias",
    "stablelm_qk_layernorm": "norm",
    "olmo2": "norm",
    "olmoe": "norm",
    "cohere_use_qk_norm": "norm",
}
"""Where something else than Q, K, V and O belongs to single heads -> what."""
PAIRS = [
    pytest.param(case, method, id=f"{case.name}-{method}")
    for case in CASES
    for method in ("subspace", "align")
    if min(case.targets) < case.kv_heads
]


def convert(model: PreTrainedModel, tmp_path: Path, target: int, method: str) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Save, convert by the command line, load."""
    model.save_pretrained(tmp_path / "source")
    arguments = ["convert", str(tmp_path / "source"), str(tmp_path / "target"), "--kv-heads", str(target)]
    result = CliRunner().invoke(app, [*arguments, "--method", method, "--quiet"])
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    auto: Any = AutoModelForCausalLM  # its methods are not annotated
    loaded, loading = auto.from_pretrained(tmp_path / "target", output_loading_info=True, dtype=torch.float32)
    return loaded.eval(), loading


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    """Logits of the fixed tokens."""
    found: Tensor = model(TOKENS, use_cache=False).logits
    return found


@pytest.mark.parametrize(("case", "method"), PAIRS)
def test_equal_heads_merge_without_loss(case: Case, method: str, tmp_path: Path) -> None:
    target = max(target for target in case.targets if target < case.kv_heads)
    planted = expanded_reference(case.build(), case.layout, case.kv_heads, target)
    model, loading = convert(planted, tmp_path, target, method)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    expected = logits(planted)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=2e-5 * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES if 1 in case.targets])
def test_different_heads_load_and_are_finite(case: Case, tmp_path: Path) -> None:
    model, loading = convert(case.build(), tmp_path, 1, "subspace")
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert torch.isfinite(logits(model)).all()


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name) for case in CASES if min(case.targets) < case.kv_heads]
)
def test_heads_are_reordered_only_where_their_index_does_not_matter(case: Case, tmp_path: Path) -> None:
    model = case.build()
    model.save_pretrained(tmp_path / "source")
    target = max(target for target in case.targets if target < case.kv_heads)
    arguments = ["convert", str(tmp_path / "source"), str(tmp_path / "target"), "--kv-heads", str(target)]
    result = CliRunner().invoke(app, [*arguments, "--method", "subspace", "--grouping", "similar", "--quiet"])
    reason = REORDER_REFUSED.get(case.name)
    if reason is not None:
        assert result.exit_code == 2, result.output
        assert reason in result.stderr
        return
    assert result.exit_code == 0, result.stderr
    auto: Any = AutoModelForCausalLM  # its methods are not annotated
    merged = auto.from_pretrained(tmp_path / "target", dtype=torch.float32).eval()
    assert torch.isfinite(logits(merged)).all()
