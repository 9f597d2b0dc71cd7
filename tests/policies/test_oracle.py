"""What stays, and the logits, against an oracle that masks instead of evicting."""

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from gqaconvert.policies.apply import apply_policy, make_cache
from gqaconvert.policies.cache import EvictLayer, held_entries
from gqaconvert.policies.spec import KVPolicy
from tests.policies.models import in_chunks, kept, tiny, tokens
from tests.policies.oracle import Oracle, Rule

LENGTH = 22
RULES = {
    "tova:9": Rule("tova", 9),
    "tova:9:sinks=2:recent=3": Rule("tova", 9, sinks=2, recent=3),
    "tova:2/5": Rule("tova", ratio=0.4),
    "tova-head:9": Rule("tova-head", 9),
    "l2:9:skip=": Rule("l2", 9),
    "l2:0.5:skip=": Rule("l2", ratio=0.5),
    "l2-high:9:skip=": Rule("l2-high", 9),
    "window:9": Rule("window", 9),
    "window+sinks:9": Rule("window", 9, sinks=4),
    "h2o:9": Rule("h2o", 9, recent=0.5),
    "h2o:0.25:recent=1": Rule("h2o", ratio=0.25, recent=1),
}


@pytest.mark.parametrize(("chunk", "kv_heads"), [(1, 2), (7, 8)])
@pytest.mark.parametrize("text", RULES)
def test_kept_entries_and_logits(text: str, chunk: int, kv_heads: int) -> None:
    ids = tokens(1, LENGTH)
    policy, rule = KVPolicy.parse(text), RULES[text]
    model = tiny(num_key_value_heads=kv_heads)
    oracle = Oracle(tiny(implementation="eager", num_key_value_heads=kv_heads), rule)
    expected = torch.cat([oracle.feed(part) for part in torch.split(ids, chunk, dim=1)], dim=1)
    logits, cache = in_chunks(model, ids, policy, chunk)
    assert [kept(cache, layer) for layer in range(3)] == [[sorted(head) for head in heads] for heads in oracle.alive]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
    assert held_entries(cache) == (rule.target(LENGTH),) * 3
    # The policy matters here: with everything kept, the logits are others.
    full, _ = in_chunks(model, ids, KVPolicy("tova", keep_ratio=Fraction(1)), chunk)
    assert (full - expected).abs().max() > 1e-2


@pytest.mark.parametrize("text", ["tova:9", "tova-head:9", "h2o:9"])
def test_scores_are_those_of_eager_attention(text: str) -> None:
    """With eager attention the weights are at hand, with SDPA they are computed again."""
    ids, policy = tokens(1, 30), KVPolicy.parse(text)
    logits, cache = in_chunks(tiny(), ids, policy, 5)
    eager, other = in_chunks(tiny(implementation="eager"), ids, policy, 5)
    assert [kept(cache, layer) for layer in range(3)] == [kept(other, layer) for layer in range(3)]
    torch.testing.assert_close(logits, eager, atol=1e-5, rtol=1e-5)


def test_tova_stores_no_more_than_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step k entries, in its attention k + 1 (Oren et al., algorithm 1)."""
    model, policy = tiny(), KVPolicy.parse("tova:16")
    cache = make_cache(model, policy)
    during: list[int] = []
    after: list[int] = []
    update = EvictLayer.update

    def watched(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        states = update(*args, **kwargs)
        during.append(states[0].shape[2])
        return states

    monkeypatch.setattr(EvictLayer, "update", watched)
    with apply_policy(model, policy), torch.no_grad():
        for column in tokens(1, 60).T:
            model(column[:, None], cache=cache, use_cache=True)
            after += held_entries(cache)
    assert (max(during), max(after)) == (17, 16)
    assert during[-3:] == [17, 17, 17]
    assert after[-3:] == [16, 16, 16]


def test_random_is_a_uniform_sample_that_a_seed_repeats() -> None:
    model, ids = tiny(num_key_value_heads=8, num_hidden_layers=4), tokens(1, 200)
    chosen = {}
    for text in ("random:50", "random:50:seed=1"):
        (_, cache), (_, again), (_, pieces) = (in_chunks(model, ids, KVPolicy.parse(text), n) for n in (200, 200, 1))
        chosen[text] = [head for layer in range(4) for head in kept(cache, layer)]
        assert chosen[text] == [head for layer in range(4) for head in kept(again, layer)]
        # A rank is a token's own: what is kept of all is the same whichever way they came.
        assert chosen[text] == [head for layer in range(4) for head in kept(pieces, layer)]
        assert len(set(map(tuple, chosen[text]))) == 32
        counts = torch.tensor([slot // 20 for head in chosen[text] for slot in head]).bincount(minlength=10)
        # Of 1,600 draws 160 are expected in each tenth; drawn without replacement, the deviation is below 11.
        assert (counts - 160).abs().max() < 45
    assert chosen["random:50"] != chosen["random:50:seed=1"]
