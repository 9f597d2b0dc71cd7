"""Quality can only be seen on a trained model: the example's perplexity, token by token, with a quarter of the entries."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gqaconvert.policies.spec import KVPolicy
from tests.policies.models import in_chunks

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def perplexities() -> dict[str, float]:
    """Of 8 windows of 128 tokens of the held-out text, by policy."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(EXAMPLES / "tiny-llama", dtype=torch.float32).eval()
    text = (EXAMPLES / "heldout.txt").read_text(encoding="utf-8")[:8000]
    ids = AutoTokenizer.from_pretrained(EXAMPLES / "tiny-llama")(text, verbose=False)["input_ids"]
    windows = torch.tensor(ids[:1024]).view(8, 128)
    with torch.no_grad():
        found = {"one forward pass": math.exp(float(model(windows, labels=windows).loss))}
    for name in ("full", "tova:32", "h2o:32", "window+sinks:32", "random:32"):
        logits, _ = in_chunks(model, windows[:, :-1], KVPolicy.parse(name), 1)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        found[name] = math.exp(float(loss))
    return found


def test_the_full_cache_gives_the_perplexity_of_one_forward_pass(perplexities: dict[str, float]) -> None:
    assert perplexities["full"] == pytest.approx(perplexities["one forward pass"], rel=1e-5)


@pytest.mark.parametrize("name", ["tova:32", "h2o:32", "window+sinks:32"])
def test_a_quarter_of_the_entries_is_enough(perplexities: dict[str, float], name: str) -> None:
    assert perplexities[name] < 1.02 * perplexities["full"]


def test_but_not_any_quarter(perplexities: dict[str, float]) -> None:
    assert perplexities["random:32"] > 1.3 * perplexities["full"]
