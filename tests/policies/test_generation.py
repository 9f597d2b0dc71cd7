"""The ways in which transformers uses a cache: padding, beams, chunks, reuse, and what has to be refused."""

from __future__ import annotations

import copy
from fractions import Fraction
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache

from gqaconvert.errors import GqaConvertError, InputError, UnsupportedModelError
from gqaconvert.policies.apply import apply_policy, make_cache
from gqaconvert.policies.cache import bookkeeping_bytes, held_bytes, held_entries
from gqaconvert.policies.spec import KVPolicy
from gqaconvert.policies.step import Step
from tests.policies.models import EVICTING, TINY, in_chunks, kept, tiny, tokens

# In the first layer the norm of a key depends on the token alone, so tokens that a model repeats tie there.
DISTINCT = tuple(kind.replace("skip=", "skip=0") for kind in EVICTING)
TOVA = KVPolicy.parse("tova:8")


def greedy(model: Any, ids: Tensor, **options: Any) -> Any:  # noqa: ANN401
    return model.generate(
        ids, do_sample=False, output_logits=True, return_dict_in_generate=True, **{"max_new_tokens": 8} | options
    )


@pytest.mark.parametrize(
    ("kind", "amount"), [*product(DISTINCT, [20, Fraction(1, 3)]), ("tova", 80), ("l2:skip=0", Fraction(1))]
)
def test_a_left_padded_row_is_the_row_alone(kind: str, amount: int | Fraction) -> None:
    model, policy = tiny(), KVPolicy.parse(kind, amount)
    long, short = tokens(1, 40, seed=2), tokens(1, 23, seed=3)
    ids = torch.cat([long, torch.nn.functional.pad(short, (17, 0))])
    mask = (torch.arange(40) >= torch.tensor([[0], [17]])).long()
    with apply_policy(model, policy):
        both = greedy(model, ids, attention_mask=mask)
        alone = [greedy(model, row) for row in (long, short)]
    for row, single in enumerate(alone):
        assert torch.equal(both.sequences[row, 40:], single.sequences[0, -8:])
        for ours, its in zip(both.logits, single.logits, strict=True):
            torch.testing.assert_close(ours[row], its[0], atol=5e-5, rtol=1e-5)
        shift = 17 * row
        for layer in range(3):
            real = [[slot - shift for slot in head if slot >= shift] for head in kept(both.cache, layer, row)]
            assert real == kept(single.cache, layer)


@pytest.mark.parametrize("kind", DISTINCT)
def test_a_beam_scores_what_its_tokens_score_alone(kind: str) -> None:
    """Beams are reordered at every step; the sequences that win are replayed one by one."""
    model, policy = tiny(), KVPolicy.parse(kind, 8)
    ids = tokens(2, 20)
    with apply_policy(model, policy):
        beams = greedy(model, ids, num_beams=3, num_return_sequences=2, output_scores=True, length_penalty=0.0)
    # The prompt is read in one piece, every later token by itself.
    for row, sequence in enumerate(beams.sequences):
        cache = make_cache(model, policy)
        with apply_policy(model, policy), torch.no_grad():
            logits = [model(sequence[None, :20], cache=cache).logits[0, -1]]
            logits += [model(token[None, None], cache=cache).logits[0, -1] for token in sequence[20:-1]]
        picked = torch.stack(logits).log_softmax(-1).gather(1, sequence[20:, None]).sum()
        assert abs(float(picked - beams.sequences_scores[row])) < 1e-4
    assert held_entries(beams.cache)[1:] == (8, 8)


@pytest.mark.parametrize("kind", ["tova", "l2:skip=0", "h2o"])
def test_rows_of_a_cache_can_be_taken_repeated_and_reordered(kind: str) -> None:
    model, policy = tiny(), KVPolicy.parse(kind, 8)
    ids, more = tokens(3, 20), tokens(3, 6, seed=9)
    _, cache = in_chunks(model, ids, policy, 5)
    cache.batch_select_indices(torch.tensor([0, 2]))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 0]))  # sequence 2, sequence 0
    with apply_policy(model, policy), torch.no_grad():
        logits = [model(column[:, None], cache=cache).logits for column in more[[2, 0]].T]
    for row, number in enumerate((2, 0)):
        _, alone = in_chunks(model, ids[[number]], policy, 5)
        with apply_policy(model, policy), torch.no_grad():
            single = [model(column[:, None], cache=alone).logits for column in more[[number]].T]
        torch.testing.assert_close(torch.cat(logits, dim=1)[row], torch.cat(single, dim=1)[0], atol=1e-5, rtol=1e-5)
        assert [kept(cache, layer, row) for layer in range(3)] == [kept(alone, layer) for layer in range(3)]


@pytest.mark.parametrize("kind", DISTINCT)
def test_a_prompt_in_chunks(kind: str) -> None:
    model, policy, ids = tiny(), KVPolicy.parse(kind, 20), tokens(2, 61)
    with apply_policy(model, policy):
        output = greedy(model, ids, prefill_chunk_size=16)
    logits, cache = in_chunks(model, ids, policy, 16)
    torch.testing.assert_close(output.logits[0], logits[:, -1], atol=1e-5, rtol=1e-5)
    assert held_entries(output.cache)[1:] == held_entries(cache)[1:] == (20, 20)
    assert output.cache.get_seq_length() == 61 + 7


def test_a_cache_can_be_reset_copied_and_filled_in_turns() -> None:
    model, ids = tiny(), tokens(2, 30)
    for kind in ("tova", "h2o", "l2:skip=0"):
        policy = KVPolicy.parse(kind, 8)
        expected, cache = in_chunks(model, ids, policy, 6)
        cache.reset()
        assert (held_bytes(cache), bookkeeping_bytes(cache), cache.get_seq_length()) == (0, 0, 0)
        with apply_policy(model, policy), torch.no_grad():
            first = torch.cat([model(part, cache=cache).logits for part in torch.split(ids[:, :18], 6, dim=1)], dim=1)
            twin = copy.deepcopy(cache)
            rest = [
                torch.cat([model(part, cache=held).logits for part in torch.split(ids[:, 18:], 6, dim=1)], dim=1)
                for held in (cache, twin)
            ]
        assert torch.equal(torch.cat([first, rest[0]], dim=1), expected)
        assert torch.equal(rest[0], rest[1])
        # A conversation: generate goes on from the cache, and feeds only what is new.
        with apply_policy(model, policy):
            start = greedy(model, ids, cache=make_cache(model, policy))
            longer = torch.cat([start.sequences, tokens(2, 5, seed=8)], dim=1)
            onward = greedy(model, longer, cache=start.cache)
        assert onward.cache.get_seq_length() == 30 + 8 + 5 + 7


def test_the_peak_of_a_prefill_is_one_layer() -> None:
    """Layer by layer: what was evicted is gone before the next layer stores its prompt."""
    model, policy, peaks = tiny(num_hidden_layers=8), KVPolicy.parse("tova:12"), []
    cache = make_cache(model, policy)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: peaks.append(sum(held_entries(cache))))
    with apply_policy(model, policy), torch.no_grad():
        model(tokens(1, 96), cache=cache)
    assert peaks == [12 * layer for layer in range(8)]  # and 96 more while a layer attends
    assert held_bytes(cache) == 8 * 12 * 2 * 2 * 8 * 4


def test_nothing_is_left_behind() -> None:
    model, ids = tiny(), tokens(1, 20)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    expected = greedy(model, ids)

    def stopped() -> None:
        with apply_policy(model, TOVA):
            greedy(model, ids)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped()
    assert model.config._attn_implementation == "sdpa"
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    after = greedy(model, ids)
    assert torch.equal(torch.stack(after.logits), torch.stack(expected.logits))
    assert not any("evict" in type(layer).__name__.lower() for layer in after.cache.layers)


def test_a_pass_that_failed_leaves_no_trace() -> None:
    model, ids = tiny(), tokens(1, 20)
    with apply_policy(model, TOVA):
        expected = greedy(model, ids)
        broken = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            greedy(model, ids)
        broken.remove()
        assert torch.equal(greedy(model, ids).sequences, expected.sequences)


def test_a_plain_forward_and_a_cache_without_a_config_are_under_the_policy() -> None:
    model, ids = tiny(), tokens(1, 20)
    with apply_policy(model, TOVA) as applied, torch.no_grad():
        assert held_entries(model(ids, use_cache=True).cache) == (8, 8, 8)
        assert held_entries(model.model(ids).cache) == (8, 8, 8)
        assert held_entries(model(ids, cache=DynamicCache()).cache) == (8, 8, 8)
        assert (applied.layers, dict(applied.left_alone)) == ((0, 1, 2), {})
    with apply_policy(model, KVPolicy.parse("l2:8")) as applied, torch.no_grad():
        assert held_entries(model(ids, use_cache=True).cache) == (20, 20, 8)
        assert (applied.layers, dict(applied.left_alone)) == ((2,), {0: "skipped", 1: "skipped"})
    with apply_policy(model, KVPolicy("full")) as applied, torch.no_grad():
        assert held_entries(model(ids, use_cache=True).cache) == (20, 20, 20)
        assert applied.layers == ()


def test_norms_of_16_bit_keys_are_compared_in_float32() -> None:
    """In bfloat16 itself most norms tie."""
    keys = torch.randn(1, 1, 512, 16, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    slots = torch.arange(512)[None, None]
    norms = Step(0, 0, keys, keys, slots, None, None, 1.0, None).key_norms()
    assert norms.dtype == torch.float32
    expected = keys.double().square().sum(-1).sqrt()
    torch.testing.assert_close(norms.double(), expected, atol=0, rtol=1e-6)
    assert len(torch.unique(norms)) > 500 > 200 > len(torch.unique(norms.to(torch.bfloat16)))


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "prompt lookup": ("crop", {"prompt_lookup_num_tokens": 2}),
    "static cache": ("StaticCache", {"cache_implementation": "static"}),
    "no cache": ("use_cache=False", {"use_cache": False}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_another_cache_is_refused(name: str) -> None:
    message, options = REFUSED[name]
    model = tiny()
    with pytest.raises((GqaConvertError, ValueError), match=message), apply_policy(model, TOVA):
        greedy(model, tokens(1, 20), **options)


def test_an_assistant_is_refused() -> None:
    model = tiny()
    with pytest.raises((GqaConvertError, ValueError), match="crop"), apply_policy(model, TOVA):
        greedy(model, tokens(1, 20), assistant_model=tiny(seed=1))


def test_caches_that_cannot_be_used() -> None:
    model, ids = tiny(), tokens(1, 20)
    other = make_cache(model, KVPolicy.parse("tova:9"))
    used = model(ids, use_cache=True).cache
    with apply_policy(model, TOVA):
        for cache, message in ((other, "tova:9"), (used, "20 tokens")):
            with pytest.raises(InputError, match=message):
                model(ids, cache=cache)
        with pytest.raises(InputError, match="already"), apply_policy(model, TOVA):
            pass
        with pytest.raises(InputError, match="ends in padding"):
            model(ids.repeat(2, 1), attention_mask=(torch.arange(20) < torch.tensor([[20], [18]])).long())
    ours = make_cache(model, TOVA)
    with pytest.raises(InputError, match="did not evict"):
        model(ids, cache=ours)  # outside of the block
    with pytest.raises(InputError, match="cropped"):
        ours.crop(-1)


LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
          "linear_conv_kernel_dim": 3}  # fmt: skip
HYBRID: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "qwen3_5_text": ({**LINEAR, "num_hidden_layers": 4}, (3,)),
    "jamba": ({"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 1,
               "use_mamba_kernels": False, "mamba_d_state": 5, "mamba_dt_rank": 4}, (1,)),
    "gemma3_text": ({"num_hidden_layers": 7, "sliding_window": 6}, (5,)),
}  # fmt: skip


@pytest.mark.parametrize("kind", HYBRID)
def test_layers_of_other_kinds_are_left_alone(kind: str) -> None:
    overrides, evicting = HYBRID[kind]
    model, ids = tiny(kind, **overrides), tokens(2, 20)
    expected = greedy(model, ids)
    with apply_policy(model, KVPolicy.parse("tova:1.0")) as applied:
        assert applied.layers == evicting
        assert torch.equal(torch.stack(greedy(model, ids).logits), torch.stack(expected.logits))
    with apply_policy(model, TOVA) as applied:
        cache = greedy(model, ids).cache
    assert [entries for layer, entries in enumerate(held_entries(cache)) if layer in evicting] == [8]
    assert {type(layer) for layer in cache.layers} != {type(layer) for layer in expected.cache.layers}
    for layer in applied.left_alone:
        assert type(cache.layers[layer]) is type(expected.cache.layers[layer])


def test_a_layer_that_attends_twice_is_refused() -> None:
    """DiffLlama subtracts one attention from another over the same keys."""
    model = tiny("diffllama")
    with pytest.raises(UnsupportedModelError, match="more than once"), apply_policy(model, TOVA):
        greedy(model, tokens(1, 20))
    # A module that decided last before is none that attends twice, when its layer is skipped.
    model = tiny()
    for text in ("tova:8", "tova:8:skip=2"):
        with apply_policy(model, KVPolicy.parse(text)):
            greedy(model, tokens(1, 20))


def test_models_that_cannot_evict() -> None:
    def build(kind: str, auto: Any = AutoModelForCausalLM, **values: Any) -> Any:  # noqa: ANN401
        return auto.from_config(AutoConfig.for_model(kind, **values))

    plain = {key: value for key, value in TINY.items() if key not in ("head_dim", "num_key_value_heads")}
    models = {
        "decoder-only": build(
            "t5", AutoModelForSeq2SeqLM, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=64
        ),
        "MLA": build("deepseek_v3", **plain, num_key_value_heads=8, kv_lora_rank=12, q_lora_rank=None,
                     qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=10, first_k_dense_replace=3),
        "share keys and values": build("gemma3n_text", **TINY, num_kv_shared_layers=1),
        "no layer to evict from": build("mamba", hidden_size=16, num_hidden_layers=2, state_size=4, vocab_size=64),
        "code of its own": build("bloom", hidden_size=16, n_head=2, n_layer=2, vocab_size=64),
    }  # fmt: skip
    for message, model in models.items():
        with pytest.raises(UnsupportedModelError, match=message), apply_policy(model, TOVA):
            pass
    with pytest.raises(InputError, match="only 3 layers"):
        make_cache(tiny(), KVPolicy.parse("tova:8:skip=3"))
    with pytest.raises(UnsupportedModelError, match="skipped"):
        make_cache(tiny(num_hidden_layers=2), KVPolicy.parse("l2:8"))
    with pytest.raises(UnsupportedModelError, match="no transformers model"), apply_policy(object(), TOVA):
        pass
    flex = tiny(implementation="flex_attention")
    with pytest.raises(InputError, match="flex_attention"), apply_policy(flex, TOVA):
        pass
    assert flex.config._attn_implementation == "flex_attention"
