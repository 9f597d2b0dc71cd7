"""The cache's bytes at the logits level, where the stock class keeps less or more than one entry a token and KV head."""

import json
from pathlib import Path

import pytest
import torch

from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.stock import load_stock
from gqaconvert.validation.logits_level import cache_of, check_cache
from gqaconvert.validation.pair import open_pair
from tests.families.cases import CASES
from tests.support.runs import convert, invoke

# Head dims 16 and 12, float32: 128 and 96 bytes an entry of K and V; 48 tokens, windows of 5 that keep 4.
BYTES = {
    ("mistral", 2): 2 * 2 * 4 * 128,
    ("gemma2", 2): 2 * 2 * (4 + 48) * 128,
    ("cohere2", 2): 2 * (3 * 4 + 48) * 96,
    ("falcon_mha", 4): 2 * 4 * 48 * 96,
    ("falcon_mha", 1): 2 * 1 * 48 * 96,
    ("falcon_new_decoder", 1): 2 * 1 * 48 * 96,
}


@pytest.mark.parametrize(("name", "target"), BYTES)
def test_bytes(tmp_path: Path, name: str, target: int) -> None:
    case = next(case for case in CASES if case.name == name)
    case.build().save_pretrained(tmp_path / "source")
    output = convert(tmp_path / "source", tmp_path / "out", "--kv-heads", target)
    report = json.loads(invoke("validate", tmp_path / "source", output, "--level", "logits", "--json").stdout)
    check = next(check for check in report["checks"] if check["name"] == "logits.kv-cache")
    wanted = BYTES[name, target]
    assert (check["status"], check["figures"]) == ("passed", {"measured": wanted, "estimate": wanted})


@pytest.mark.parametrize(("name", "status"), [("llama", "failed"), ("falcon_mha", "skipped")])
def test_a_cache_of_another_size(tmp_path: Path, name: str, status: str) -> None:
    """Of the source, which keeps 8 heads where the output keeps one; so did Falcon's older class of any output."""
    case = next(case for case in CASES if case.name == name)
    case.build().save_pretrained(tmp_path / "source")
    source = LocalFolder.open(tmp_path / "source")
    pair = open_pair(source, LocalFolder.open(convert(source.root, tmp_path / "out", "--kv-heads", 1)))
    model, _ = load_stock(source, attention="eager")
    assert check_cache(pair, cache_of(model(torch.arange(48)[None], use_cache=True)), 48).status == status
