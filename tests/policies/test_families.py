"""Every native family: with everything kept, a policy changes not one bit; what cannot evict is refused by name."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gqaconvert.errors import UnsupportedModelError
from gqaconvert.policies.apply import apply_policy
from gqaconvert.policies.cache import held_bytes, held_entries
from gqaconvert.policies.spec import KVPolicy
from tests.families.cases import CASES, VOCABULARY, Case
from tests.policies.models import EVICTING

ALIBI = {"falcon_rw"}

WITHOUT_WINDOW = {"mistral", "phi3", "starcoder2"}
"""In these cases every layer has a window, in the same class without one none has."""

OWN_CODE = Case(
    "gpt_neo", "gpt_neo", {"attention_types": [[["global"], 2]], "num_layers": 2, "hidden_size": 64, "num_heads": 8}
)


def native() -> list[Case]:
    cases = [case for case in CASES if case.name not in ALIBI | WITHOUT_WINDOW]
    windowless = [case for case in CASES if case.name in WITHOUT_WINDOW]
    return cases + [
        replace(case, name=f"{case.name}_full", overrides={**case.overrides, "sliding_window": None})
        for case in windowless
    ]


def grouped(case: Case) -> Case:
    """With two KV heads, where the class has a number of them."""
    if "num_key_value_heads" not in case.base:
        return case
    return replace(case, overrides={**case.overrides, "num_key_value_heads": 2})


def generated(model: Any, ids: Tensor, mask: Tensor | None, count: int = 2) -> tuple[Tensor, Tensor, Any]:  # noqa: ANN401
    """Tokens, logits and cache of greedy decoding."""
    given = {} if mask is None else {"attention_mask": mask}
    output = model.generate(
        ids, max_new_tokens=count, do_sample=False, output_logits=True, return_dict_in_generate=True, pad_token_id=0,
        **given,
    )  # fmt: skip
    cache = output.cache if hasattr(output, "cache") else output.past_key_values
    return output.sequences, torch.stack(output.logits), cache


@pytest.mark.parametrize("case", [grouped(case) for case in native()], ids=lambda case: case.name)
def test_a_ratio_of_one_is_the_full_cache_bit_for_bit(case: Case) -> None:
    model = case.build()
    ids = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))
    padded = torch.ones_like(ids)
    padded[1, :4] = 0
    expected = {mask is None: generated(model, ids, mask) for mask in (None, padded)}
    for number, text in enumerate(EVICTING):
        kind, _, options = text.partition(":")
        policy = KVPolicy.parse(f"{kind}:1.0:{options}" if options else f"{kind}:1.0")
        # Both ways for the two published policies; the others take turns.
        for mask in (None, padded) if kind in ("tova", "l2") else ((None, padded)[number % 2],):
            with apply_policy(model, policy) as applied:
                sequences, logits, cache = generated(model, ids, mask)
            assert applied.layers
            assert torch.equal(sequences, expected[mask is None][0])
            assert torch.equal(logits, expected[mask is None][1])
            assert held_bytes(cache) == held_bytes(expected[mask is None][2])


@pytest.mark.parametrize("case", native(), ids=lambda case: case.name)
def test_every_family_evicts(case: Case) -> None:
    model = case.build()
    ids = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))
    full = generated(model, ids, None)
    with apply_policy(model, KVPolicy.parse("tova:4")) as applied:
        _, logits, cache = generated(model, ids, None)
    entries, others = held_entries(cache), held_entries(full[2])
    for layer in range(len(entries)):
        assert entries[layer] == (4 if layer in applied.layers else others[layer])
    assert torch.equal(logits[0], full[1][0])  # the prompt was read in full
    assert not torch.equal(logits[1], full[1][1])


REFUSED = [OWN_CODE, *(case for case in CASES if case.name in ALIBI | WITHOUT_WINDOW)]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_what_cannot_evict_is_refused_by_name(case: Case) -> None:
    why = "ALiBi" if case.name in ALIBI else "no layer to evict from .sliding window."
    if case is OWN_CODE:
        why = "code of its own"
    model = case.build()
    with pytest.raises(UnsupportedModelError, match=why), apply_policy(model, KVPolicy.parse("tova:4")):
        pass
    with apply_policy(model, KVPolicy("full")) as applied:
        assert generated(model, torch.ones(1, 3, dtype=torch.long), None)[0].shape == (1, 5)
    assert applied.layers == ()
