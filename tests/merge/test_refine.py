"""Refinement on a tiny stock Llama whose layers were merged."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from gqaconvert.merge.heads import AttentionHeads, Rotary
from gqaconvert.merge.moments import Call, record_calls
from gqaconvert.merge.refine import (
    JointSettings,
    Refinement,
    RefineSettings,
    Streams,
    divergence,
    merge_layer,
    orthogonal_step,
    refine_jointly,
)
from gqaconvert.merge.subspace import merge_subspace

HEADS, DIM, WIDTH = 4, 8, 32
SETTINGS = RefineSettings(steps=12, batches_per_step=2, held_out=2)


def _model(kv: int) -> Any:  # noqa: ANN401
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=kv,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.train(False)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    return model


def _heads(attention: Any) -> AttentionHeads:  # noqa: ANN401
    rows = [
        part.weight.double().reshape(-1, DIM, WIDTH) for part in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    return AttentionHeads(rows[0], rows[1], rows[2], attention.o_proj.weight.double().T.reshape(-1, DIM, WIDTH))


def _write(attention: Any, heads: AttentionHeads) -> None:  # noqa: ANN401
    with torch.no_grad():
        for part, rows in (("q", heads.query), ("k", heads.key), ("v", heads.value)):
            attention.get_submodule(f"{part}_proj").weight.copy_(rows.reshape(-1, WIDTH))
        attention.o_proj.weight.copy_(heads.output.reshape(-1, WIDTH).T)


def _convert(kv: int, settings: RefineSettings) -> tuple[Any, Any, list[Refinement], Streams]:
    original, merged = _model(HEADS), _model(kv)
    state = {
        key: value for key, value in original.state_dict().items() if ".k_proj" not in key and ".v_proj" not in key
    }
    merged.load_state_dict(state, strict=False)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 40, (2, 16), generator=generator) for _ in range(8)]
    calls = record_calls(original, list(original.model.layers), batches[0])
    embedded = [record_calls(original, list(original.model.layers), tokens)[0].hidden for tokens in batches]
    for layer in merged.model.layers:
        layer.self_attn.requires_grad_(True)
    streams, results = Streams(embedded, embedded), []
    for before, after, call in zip(original.model.layers, merged.model.layers, calls, strict=True):

        def merge(moment: Tensor, before: Any = before, after: Any = after) -> None:  # noqa: ANN401
            heads = merge_subspace(_heads(before.self_attn), kv, rotary=Rotary(DIM), moment=moment).heads
            _write(after.self_attn, heads)

        result, streams = merge_layer(before, after, "self_attn", call, streams, merge, settings)
        results.append(result)
    return original, merged, results, streams


def test_refinement_lowers_the_error_that_it_reports() -> None:
    """The reported error is recomputed from the models' streams, on the held-out batches."""
    _, _, plain, _ = _convert(2, RefineSettings(steps=0, held_out=2))
    original, merged, refined, _ = _convert(2, SETTINGS)
    assert refined[0].before == pytest.approx(plain[0].before, rel=1e-5)
    assert refined[0].after < 0.8 * refined[0].before
    assert plain[0].after == plain[0].before
    generator = torch.Generator().manual_seed(1)
    held = [torch.randint(0, 40, (2, 16), generator=generator) for _ in range(8)][-2:]
    errors = []
    for tokens in held:
        streams = []
        for model in (original, merged):
            layer = model.model.layers[0]
            call = record_calls(model, list(model.model.layers), tokens)[0]
            attended = layer.self_attn(
                hidden_states=layer.input_layernorm(call.hidden),
                position_embeddings=call.kwargs["position_embeddings"],
                attention_mask=call.kwargs["attention_mask"],
            )[0]
            streams.append(call.hidden + attended)
        errors.append(((streams[0] - streams[1]).square().sum(-1) / streams[0].square().sum(-1)).mean())
    assert refined[0].after == pytest.approx(float(torch.stack(errors).mean()), rel=1e-4)


def test_refined_model_is_closer_in_its_logits() -> None:
    tokens = torch.randint(0, 40, (8, 16), generator=torch.Generator().manual_seed(9))
    distances = []
    for settings in (RefineSettings(steps=0), SETTINGS):
        original, merged, _, _ = _convert(2, settings)
        distances.append(float((original(tokens).logits - merged(tokens).logits).square().mean()))
    assert distances[1] < 0.9 * distances[0]


def test_streams_are_those_of_the_models() -> None:
    original, merged, _, streams = _convert(2, SETTINGS)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 40, (2, 16), generator=generator)
    for model, stream in ((original, streams.original[0]), (merged, streams.merged[0])):
        torch.testing.assert_close(model.model.norm(stream), model.model(tokens).last_hidden_state)


def test_same_seed_same_weights_and_no_gradient_is_left() -> None:
    one, other = _convert(2, SETTINGS)[1], _convert(2, SETTINGS)[1]
    for first, second in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(first, second)
        assert first.grad is None
    different = _convert(2, RefineSettings(steps=12, batches_per_step=2, held_out=2, seed=1))[1]
    assert not torch.equal(
        one.model.layers[0].self_attn.q_proj.weight, different.model.layers[0].self_attn.q_proj.weight
    )


def test_only_attention_changes() -> None:
    original, merged, _, _ = _convert(2, SETTINGS)
    changed = {
        name
        for name, value in merged.state_dict().items()
        if value.shape != original.state_dict()[name].shape or not torch.equal(value, original.state_dict()[name])
    }
    assert changed == {name for name in merged.state_dict() if "self_attn" in name}


def test_nothing_to_gain_leaves_the_weights() -> None:
    """With all heads kept the error is zero already, and a refinement that does harm is undone."""
    original, merged, results, _ = _convert(HEADS, SETTINGS)
    assert all(result.after <= result.before < 1e-9 for result in results)
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, original.state_dict()[name], atol=1e-4, rtol=1e-4)


def test_automatic_stops_by_itself() -> None:
    settings = RefineSettings(steps=6, automatic=True, batches_per_step=2, held_out=2)
    _, _, automatic, _ = _convert(2, settings)
    _, _, once, _ = _convert(2, RefineSettings(steps=6, batches_per_step=2, held_out=2))
    assert automatic[0].after <= once[0].after
    assert 6 <= automatic[0].steps <= 24
    assert automatic[0].steps % 6 == 0


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        _convert(2, RefineSettings(held_out=8))


@pytest.mark.parametrize("shape", [(6, 6), (3, 40), (40, 3), (12,)])
def test_steps_are_near_orthogonal(shape: tuple[int, ...]) -> None:
    direction = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    step = orthogonal_step(direction).reshape(-1, shape[-1])
    singular = torch.linalg.svdvals(step) / max(step.shape) ** 0.5
    assert singular.min() > 0.3
    assert singular.max() < 1.3
    left, _, right = torch.linalg.svd(direction.reshape(-1, shape[-1]), full_matrices=False)
    aligned = (step * (left @ right)).sum() / (step.norm() * (left @ right).norm())
    assert aligned > 0.95


def test_zero_gradient_gives_zero_step() -> None:
    assert torch.equal(orthogonal_step(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_call_keeps_how_hidden_states_were_passed() -> None:
    layer = nn.Linear(4, 4)
    hidden, other = torch.ones(1, 2, 4), torch.zeros(1, 2, 4)
    call = Call(hidden, None, (), {})
    torch.testing.assert_close(call.run(layer), layer(hidden))
    torch.testing.assert_close(call.run(layer, other), layer(other))
    assert Call(hidden, "hidden_states", (), {"mask": None}).arguments()[1] == {"hidden_states": hidden, "mask": None}
    assert copy.copy(call).arguments()[0][0] is hidden


def test_joint_refinement_brings_the_distributions_together() -> None:
    original, merged, _, _ = _convert(2, RefineSettings(steps=0))
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randint(0, 40, (2, 16), generator=generator) for _ in range(9)]
    before = {name: value.clone() for name, value in merged.state_dict().items()}
    attentions = [layer.self_attn for layer in merged.model.layers]
    unseen = batches.pop()
    start = float(divergence(original, merged, unseen))
    losses = refine_jointly(original, merged, attentions, batches, JointSettings(steps=10, learning_rate=0.01))
    assert len(losses) == 10
    assert float(divergence(original, merged, unseen)) < 0.9 * start
    for name, value in merged.state_dict().items():
        assert torch.equal(value, before[name]) == ("self_attn" not in name)


def test_divergence_is_that_of_the_softmax() -> None:
    original, merged, _, _ = _convert(2, RefineSettings(steps=0))
    tokens = torch.randint(0, 40, (1, 8), generator=torch.Generator().manual_seed(3))
    expected = torch.nn.functional.kl_div(
        merged(tokens).logits[0].log_softmax(-1), original(tokens).logits[0].softmax(-1), reduction="batchmean"
    )
    assert float(divergence(original, merged, tokens)) == pytest.approx(float(expected), rel=1e-4)
    assert float(divergence(original, original, tokens)) == pytest.approx(0.0, abs=1e-6)


def test_parameters_that_require_no_gradient_stay() -> None:
    """A caller that does not store a norm or a sink keeps it out of the refinement."""
    original, merged, _, _ = _convert(2, RefineSettings(steps=0))
    attentions = [layer.self_attn for layer in merged.model.layers]
    for attention in attentions:
        attention.v_proj.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in merged.state_dict().items()}
    tokens = torch.randint(0, 40, (2, 16), generator=torch.Generator().manual_seed(4))
    refine_jointly(original, merged, attentions, [tokens], JointSettings(steps=2))
    changed = {
        name.split(".")[-2] for name, value in merged.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed == {"q_proj", "k_proj", "o_proj"}
