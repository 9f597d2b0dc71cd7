"""What the tasks of ``evaluate`` measure, against closed forms, slow loops and the stock classes."""

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from gqaconvert.errors import InputError
from gqaconvert.evaluation.budgets import policies
from gqaconvert.evaluation.norms import layer_norms, relative_alr
from gqaconvert.evaluation.perplexity import policy_perplexity
from gqaconvert.evaluation.probe import constant_attention, pooled_layer, probe_layers
from gqaconvert.evaluation.retrieval import DEPTHS, prompts
from gqaconvert.evaluation.subject import Subject, open_subject
from gqaconvert.policies.spec import KVPolicy
from tests.support.runs import convert

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples/tiny-llama"
TEXT = (ROOT / "examples/heldout.txt").read_text()


@pytest.fixture(scope="module")
def subject() -> Subject:
    return open_subject(str(TINY))


@pytest.fixture(scope="module")
def stock() -> Any:  # noqa: ANN401
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(TINY, dtype=torch.float32, attn_implementation="eager").eval()


def windows(count: int, length: int) -> torch.Tensor:
    ids = AutoTokenizer.from_pretrained(TINY)(TEXT, verbose=False)["input_ids"]
    return torch.tensor(ids[: count * length]).view(count, length)


def loss(model: Any, ids: torch.Tensor) -> float:  # noqa: ANN401
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)


def nothing(count: int) -> None:
    """No progress."""


@pytest.mark.parametrize("chunk", [1, 7, 0])
def test_perplexity_of_the_full_cache_is_the_stock_models(subject: Subject, stock: Any, chunk: int) -> None:  # noqa: ANN401
    ids = windows(2, 40)
    assert torch.equal(subject.windows(None, 2, 40), ids)
    value, held, peak, _ = policy_perplexity(subject, ids, KVPolicy("full"), chunk, nothing)
    assert value == pytest.approx(math.exp(loss(stock, ids)), rel=1e-5)
    # 4 layers x 8 heads x (16 + 16) x float32, of all tokens but the last, which predicts nothing
    assert held == peak == 39 * 4 * 8 * 32 * 4


def test_a_window_policy_is_the_stock_model_with_a_short_memory(subject: Subject, stock: Any) -> None:  # noqa: ANN401
    """In one layer only the newest entries matter; by an additive mask on the stock class, skipping the others."""
    ids = windows(1, 24)
    value, *_ = policy_perplexity(subject, ids, KVPolicy.parse("window:6"), 1, nothing)
    # A token sees the 6 entries that were kept before it, and itself.
    places = torch.arange(23)
    seen = (places[None] <= places[:, None]) & (places[None] >= places[:, None] - 6)
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        logits = stock(input_ids=ids[:, :-1], attention_mask=mask).logits[0]
    expected = torch.nn.functional.cross_entropy(logits, ids[0, 1:])
    assert value == pytest.approx(float(expected.exp()), rel=1e-5)


def test_budgets_become_entries_or_ratios() -> None:
    found = list(policies(("tova", "l2", "window:9", "full"), ("1/8", "1/3"), 100))
    assert [(budget, str(policy)) for budget, policy in found] == [
        (None, "full"), ("1/8", "tova:13"), ("1/3", "tova:34"), ("1/8", "l2:0.125:skip=0,1"),
        ("1/3", "l2:1/3:skip=0,1"), (None, "window:9"),
    ]  # fmt: skip
    for bad in (("tova",), ("3/2",)), (("tova",), ("0",)), (("tuva",), ("1/2",)), (("tova:sinks=x",), ("1/2",)):
        with pytest.raises(InputError):
            list(policies(*bad, 100))


def slow_alr(attention: list[float], norms: list[float]) -> float:
    """Equations 1 to 3, with lists; the mean over all orders as the chance."""
    count = len(attention)

    def lost(order: list[int]) -> float:
        return sum(sum(attention[key] for key in order[:dropped]) for dropped in range(1, count + 1))

    by_norm = lost(sorted(range(count), key=lambda key: -norms[key]))
    best = lost(sorted(range(count), key=lambda key: attention[key]))
    from itertools import permutations

    orders = list(permutations(range(count)))
    chance = sum(lost(list(order)) for order in orders) / len(orders)
    return (by_norm - best) / (chance - best)


def test_alr_in_closed_form_and_by_a_slow_loop() -> None:
    attention = torch.tensor([0.5, 0.25, 0.15, 0.1])
    assert float(relative_alr(attention, torch.tensor([1.0, 2.0, 3.0, 4.0]))) == pytest.approx(0)  # perfect
    assert float(relative_alr(attention, torch.tensor([4.0, 3.0, 2.0, 1.0]))) == pytest.approx(2)  # worst: mirrored
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        attention = torch.rand(6, generator=generator).softmax(-1)
        norms = torch.rand(6, generator=generator)
        expected = slow_alr(attention.tolist(), norms.tolist())
        assert float(relative_alr(attention, norms)) == pytest.approx(expected, abs=1e-6)


def test_alr_of_a_layer_takes_keys_as_they_are_cached(subject: Subject, stock: Any) -> None:  # noqa: ANN401
    ids = windows(1, 32)
    found = layer_norms(subject, ids, nothing)
    assert [norms.layer for norms in found] == [0, 1, 2, 3]
    with torch.no_grad():
        outputs = stock(ids, use_cache=True, output_attentions=True)
    cache = outputs["cache"] if "cache" in outputs else outputs["past_key_values"]
    for layer in (0, 3):
        for head in (0, 5):
            values = []
            for place in (17, 19, 21, 23, 25, 27, 29, 31):
                attention = outputs.attentions[layer][0, head, place, : place + 1].double()
                norms = cache.layers[layer].keys[0, head, : place + 1].double().norm(dim=-1)
                order = norms.argsort(descending=True)
                lost = float(attention[order].cumsum(0).sum())
                best = float(attention.sort().values.cumsum(0).sum())
                chance = sum(float(attention.sum()) * m / len(attention) for m in range(1, len(attention) + 1))
                values.append((lost - best) / (chance - best))
            assert found[layer].heads[head] == pytest.approx(sum(values) / 8, rel=1e-2)  # norms that nearly tie
    assert subject.model.config._attn_implementation == "sdpa"


def test_pooling_all_layers_one_by_one_is_the_conversion(subject: Subject, tmp_path: Path) -> None:
    from contextlib import ExitStack

    ids = windows(1, 48)
    before = loss(subject.model, ids)
    with ExitStack() as stack:
        for site in subject.checkpoint.require_sites():
            stack.enter_context(pooled_layer(subject, site, 2))
        all_pooled = loss(subject.model, ids)
    assert loss(subject.model, ids) == before
    auto: Any = AutoModelForCausalLM
    folder = convert(TINY, tmp_path / "out", "--kv-heads", 2, "--dtype", "float32")
    converted = auto.from_pretrained(folder, dtype=torch.float32).eval()
    assert all_pooled == pytest.approx(loss(converted, ids), rel=1e-5)


def test_constant_attention_is_what_it_says(subject: Subject, stock: Any) -> None:  # noqa: ANN401
    """A layer that attends by the matrix that it has anyway computes what it computes; and by another, otherwise."""
    ids = windows(1, 20)
    with torch.no_grad():
        own = stock(ids, output_attentions=True).attentions[2][0]
    with constant_attention(subject, 2, own):
        assert loss(subject.model, ids) == pytest.approx(loss(stock, ids), abs=1e-5)
    with constant_attention(subject, 2, torch.eye(20).expand(8, 20, 20)):
        assert abs(loss(subject.model, ids) - loss(stock, ids)) > 1e-3
    assert loss(subject.model, ids) == pytest.approx(loss(stock, ids), abs=1e-5)


def test_the_probe_judges_on_other_text_than_it_averages(subject: Subject, stock: Any) -> None:  # noqa: ANN401
    ids = windows(4, 32)
    baseline, layers = probe_layers(subject, ids, 2, nothing)
    assert baseline == pytest.approx(loss(stock, ids[2:]), abs=1e-5)
    site = subject.checkpoint.require_sites()[1]
    with pooled_layer(subject, site, 2):
        assert layers[1].pooled == pytest.approx(loss(subject.model, ids[2:]) - baseline, abs=1e-5)
    with torch.no_grad():
        mean = torch.stack([stock(window[None], output_attentions=True).attentions[1][0] for window in ids[:2]]).mean(0)
    with constant_attention(subject, 1, mean):
        assert layers[1].constant == pytest.approx(loss(subject.model, ids[2:]) - baseline, abs=1e-5)


@pytest.mark.parametrize("task", ["passkey", "needle"])
def test_what_is_hidden_lies_at_its_depth(task: str, subject: Subject) -> None:
    tokenizer = subject.tokenizer()
    found = prompts(subject, task, 200, 2, None, 0)
    assert [prompt.depth for prompt in found] == [depth for depth in DEPTHS for _ in range(2)]
    assert len({prompt.key for prompt in found}) == 10
    for prompt in found:
        assert len(prompt.context) == 200
        text = tokenizer.decode(prompt.context)
        assert text.count(prompt.key) == 2
        assert text.index(prompt.key) / len(text) == pytest.approx(prompt.depth, abs=0.35)
        assert prompt.key not in tokenizer.decode(prompt.question)
    assert prompts(subject, task, 200, 2, None, 0) == found
    assert prompts(subject, task, 200, 2, None, 1) != found
    with pytest.raises(InputError, match="no place to hide"):
        prompts(subject, task, 40, 1, None, 0)


def test_entries_follow_from_the_fraction() -> None:
    assert next(iter(p for b, p in policies(("tova",), ("1/8",), 100) if b)).budget == math.ceil(Fraction(100, 8))
