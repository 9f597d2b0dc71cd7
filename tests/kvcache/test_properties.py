"""Laws that every estimate obeys, for drawn models."""

from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from gqaconvert.errors import InputError
from gqaconvert.kvcache.dtypes import CACHE_DTYPES
from gqaconvert.kvcache.layers import (
    AttentionCache,
    CacheLayer,
    CacheModel,
    CacheSettings,
    CrossCache,
    LatentCache,
    StateCache,
    cache_size,
)
from gqaconvert.policies.spec import KVPolicy

HEADS = 16


@st.composite
def models(draw: st.DrawFn) -> CacheModel:
    layers: list[CacheLayer] = []
    for layer in range(draw(st.integers(1, 6))):
        heads, key, value = draw(st.sampled_from((1, 2, 4, 8, 16))), 32, draw(st.sampled_from((32, 64)))
        choices: tuple[CacheLayer, ...] = (
            AttentionCache(layer, heads, key, value),
            AttentionCache(layer, heads, key, value, draw(st.integers(2, 50))),
            LatentCache(layer, 64, 32, HEADS, key, value),
            CrossCache(layer, heads, key, value),
            StateCache(layer, 64, 4, 1024, 16),
        )
        layers.append(draw(st.sampled_from(choices)))
    return CacheModel("drawn", HEADS, None, len(layers), tuple(layers), "drawn")


settings = st.builds(
    CacheSettings,
    key=st.sampled_from(list(CACHE_DTYPES.values())),
    value=st.sampled_from(list(CACHE_DTYPES.values())),
    tensor_parallel=st.sampled_from((1, 2, 4, 8, 16)),
    block=st.sampled_from((1, 16, 100)),
    encoder_tokens=st.integers(0, 40),
    runtime=st.sampled_from(("engine", "transformers")),
)
tokens = st.integers(1, 300)


@budget(max_examples=50, deadline=None)
@given(models(), settings, tokens, tokens, st.integers(1, 5))
def test_more_tokens_never_need_less(model: CacheModel, held: CacheSettings, first: int, more: int, batch: int) -> None:
    assert cache_size(model, first, batch, held).total <= cache_size(model, first + more, batch, held).total


@budget(max_examples=50, deadline=None)
@given(models(), settings, tokens, st.integers(1, 5), st.integers(1, 5))
def test_sequences_add(model: CacheModel, held: CacheSettings, length: int, first: int, second: int) -> None:
    one, two = (cache_size(model, length, batch, held).total for batch in (first, second))
    assert one + two == cache_size(model, length, first + second, held).total


@budget(max_examples=50, deadline=None)
@given(models(), settings, tokens)
def test_layers_add(model: CacheModel, held: CacheSettings, length: int) -> None:
    alone = [cache_size(replace(model, layers=(layer,)), length, 1, held).total for layer in model.layers]
    assert sum(alone) == cache_size(model, length, 1, held).total


@budget(max_examples=50, deadline=None)
@given(models(), settings, tokens)
def test_devices_sum_to_the_total_and_never_save(model: CacheModel, held: CacheSettings, length: int) -> None:
    size = cache_size(model, length, 1, held)
    assert size.per_device * held.tensor_parallel == size.total
    assert size.total >= cache_size(model, length, 1, replace(held, tensor_parallel=1)).total


@budget(max_examples=50, deadline=None)
@given(models(), settings, st.integers(1, 18), st.integers(0, 15))
def test_blocks_only_round_up(model: CacheModel, held: CacheSettings, blocks: int, less: int) -> None:
    paged, exact = replace(held, block=16), replace(held, block=1)
    length = 16 * blocks - less
    assert cache_size(model, length, 1, exact).total <= cache_size(model, length, 1, paged).total
    assert cache_size(model, length, 1, paged).total == cache_size(model, 16 * blocks, 1, paged).total


@given(st.integers(1, 8), st.integers(1, 300), st.fractions(Fraction(1, 100), 1, max_denominator=100))
def test_a_ratio_keeps_its_part_rounded_up(layers: int, length: int, ratio: Fraction) -> None:
    kept = KVPolicy("l2", keep_ratio=ratio, skip_layers=(0,)).entries(layers, length)
    assert ratio * length <= kept < ratio * length + 1


@pytest.mark.parametrize(
    "text",
    [
        "tova",
        "tova:0",
        "l2:1.5",
        "l2:0.0",
        "lru:5",
        "tova:-1",
        "l2:0.5:skip=x",
        "",
        "full:4",
        "full:sinks=1",
        "l2:3/2",
        "l2:1/0",
        "window:4:sinks=4",
        "tova:8:recent=8",
        "tova:8:recent=1/1",
        "tova:8:9",
        "tova:8:first=1",
        "tova:8:sinks",
    ],
)
def test_policies_that_are_none(text: str) -> None:
    with pytest.raises(InputError):
        KVPolicy.parse(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tova:512", KVPolicy("tova", budget=512)),
        ("l2:0.5", KVPolicy("l2", keep_ratio=Fraction(1, 2), skip_layers=(0, 1))),
        ("l2:0.5:skip=", KVPolicy("l2", keep_ratio=Fraction(1, 2))),
        ("l2:.25:skip=12,0", KVPolicy("l2", keep_ratio=Fraction(1, 4), skip_layers=(0, 12))),
        ("l2-high:1/3:skip=2", KVPolicy("l2-high", keep_ratio=Fraction(1, 3), skip_layers=(2,))),
        ("window:256:sinks=4", KVPolicy("window", budget=256, sinks=4)),
        ("window+sinks:256", KVPolicy("window+sinks", budget=256, sinks=4)),
        ("window+sinks:256:sinks=1", KVPolicy("window+sinks", budget=256, sinks=1)),
        ("h2o:1/8", KVPolicy("h2o", keep_ratio=Fraction(1, 8), recent=Fraction(1, 2))),
        ("h2o:64:recent=8", KVPolicy("h2o", budget=64, recent=8)),
        ("tova-head:1.0", KVPolicy("tova-head", keep_ratio=Fraction(1))),
        ("random:0.5:seed=3", KVPolicy("random", keep_ratio=Fraction(1, 2), seed=3)),
        ("full", KVPolicy("full")),
    ],
)
def test_policies_are_read_back(text: str, expected: KVPolicy) -> None:
    assert KVPolicy.parse(text) == expected
    assert KVPolicy.parse(str(expected)) == expected


def test_an_amount_for_a_policy_without_one() -> None:
    assert KVPolicy.parse("l2:skip=3", Fraction(1, 4)) == KVPolicy.parse("l2:1/4:skip=3")
    assert KVPolicy.parse("tova", 7) == KVPolicy.parse("tova:9").at(7)
    assert KVPolicy.parse("full", Fraction(1, 8)) == KVPolicy.parse("full").at(3) == KVPolicy("full")
    with pytest.raises(InputError, match="already"):
        KVPolicy.parse("tova:9", 7)
