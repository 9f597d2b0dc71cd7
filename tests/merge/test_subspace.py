from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gqaconvert.merge.align import merge_aligned
from gqaconvert.merge.groups import MergeResult
from gqaconvert.merge.heads import AttentionHeads, KeyFreedom, Rotary, change_key_basis, change_value_basis
from gqaconvert.merge.subspace import merge_subspace
from tests.merge.attention import attention, rms_norm
from tests.merge.cases import (
    NORMED,
    SCHEMES,
    Shape,
    free_key_basis,
    planted,
    random_heads,
    random_inputs,
    random_moment,
)

SMALL = settings(max_examples=40, deadline=None)


def _difference(one: AttentionHeads, other: AttentionHeads, shape: Shape, rotary: Rotary) -> float:
    inputs = random_inputs(shape)
    return float((attention(one, inputs, rotary) - attention(other, inputs, rotary)).abs().max())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("name", [*SCHEMES, *NORMED])
def test_same_count_changes_nothing(name: str, calibrated: bool, bias: bool) -> None:
    shape, rotary = Shape(bias=bias), (SCHEMES | NORMED)[name]
    heads = random_heads(shape)
    result = merge_subspace(heads, 4, rotary=rotary, moment=random_moment(shape) if calibrated else None)
    assert _difference(result.heads, heads, shape, rotary) < 1e-9
    assert result.key_explained.tolist() == result.value_explained.tolist() == [1.0] * 4


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize(("queries", "kv", "target"), [(4, 4, 2), (4, 4, 1), (8, 4, 2), (6, 6, 2)])
@pytest.mark.parametrize("name", SCHEMES)
def test_copies_of_a_head_in_other_bases_merge_without_loss(
    name: str, queries: int, kv: int, target: int, calibrated: bool, bias: bool
) -> None:
    shape, rotary = Shape(queries=queries, kv=kv, bias=bias), SCHEMES[name]
    heads = planted(shape, rotary, target)
    result = merge_subspace(heads, target, rotary=rotary, moment=random_moment(shape) if calibrated else None)
    assert result.heads.num_key_value_heads == target
    assert _difference(result.heads, heads, shape, rotary) < 1e-6
    torch.testing.assert_close(result.key_explained, torch.ones(target, dtype=torch.float64), atol=1e-9, rtol=0)
    torch.testing.assert_close(result.value_explained, torch.ones(target, dtype=torch.float64), atol=1e-9, rtol=0)


@pytest.mark.parametrize("planted_as", ["rope, half-split", "rope, interleaved"])
def test_copies_of_the_other_pairing_do_not_merge(planted_as: str) -> None:
    shape = Shape(queries=4, kv=4)
    heads = planted(shape, SCHEMES[planted_as], 1)
    wrong = next(rotary for name, rotary in SCHEMES.items() if name.startswith("rope") and name != planted_as)
    result = merge_subspace(heads, 1, rotary=wrong)
    assert float(result.key_explained) < 0.9
    assert _difference(result.heads, heads, shape, SCHEMES[planted_as]) > 1e-2


def test_alibi_leaves_keys_free() -> None:
    shape, rotary = Shape(queries=4, kv=4), Rotary(0)
    heads = planted(shape, rotary, 2)
    merged = merge_subspace(heads, 2, rotary=rotary).heads
    inputs = random_inputs(shape)
    torch.testing.assert_close(
        attention(merged, inputs, rotary, alibi=True), attention(heads, inputs, rotary, alibi=True), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("rotary_dim", [0, 4, 8])
@pytest.mark.parametrize("interleaved", [False, True])
def test_signed_copies_behind_a_norm_merge_without_loss(rotary_dim: int, interleaved: bool) -> None:
    """A norm with one gain a dimension and RoPE stand between K and the scores: signs and scale are still free."""
    shape = Shape(queries=4, kv=4, value_dim=8)
    rotary = Rotary(rotary_dim, interleaved, KeyFreedom.SIGN)
    heads = planted(shape, Rotary(0), 2)
    generator = torch.Generator().manual_seed(5)
    signs = torch.randint(0, 2, (4, shape.dim), generator=generator).to(torch.float64) * 2 - 1
    real, imaginary = rotary.pairs()
    signs[:, imaginary] = signs[:, real]
    scales = torch.rand(4, generator=generator, dtype=torch.float64) + 0.5
    first = [0, 0, 2, 2]
    heads = replace(heads, key=scales[:, None, None] * signs[..., None] * heads.key[first])
    merged = merge_subspace(heads, 2, rotary=rotary, moment=random_moment(shape)).heads
    inputs, gain = random_inputs(shape), torch.linspace(0.5, 2, shape.dim, dtype=torch.float64)
    norm = rms_norm(gain)
    before, after = (attention(layer, inputs, rotary, query_norm=norm, key_norm=norm) for layer in (heads, merged))
    torch.testing.assert_close(after, before, atol=1e-6, rtol=0)


def test_fixed_keys_and_values_are_never_turned() -> None:
    """Behind a clamp, equal heads must merge without loss and Q and O must stay as they are."""
    shape = Shape(queries=4, kv=4)
    heads = random_heads(shape)
    heads = replace(heads, key=heads.key[[0, 0, 2, 2]], value=heads.value[[0, 0, 2, 2]])
    rotary = Rotary(8, keys=KeyFreedom.FIXED, values_free=False)
    merged = merge_subspace(heads, 2, rotary=rotary, moment=random_moment(shape)).heads
    torch.testing.assert_close(merged.query, heads.query)
    torch.testing.assert_close(merged.output, heads.output)
    inputs = random_inputs(shape)
    before, after = (attention(layer, inputs, rotary, value_clamp=0.5) for layer in (heads, merged))
    torch.testing.assert_close(after, before, atol=1e-6, rtol=0)


def test_fixed_values_are_the_least_squares_head() -> None:
    shape = Shape(queries=4, kv=4)
    heads, moment = random_heads(shape), random_moment(shape)
    merged = merge_subspace(heads, 1, rotary=Rotary(8, values_free=False), moment=moment).heads

    def loss(value: torch.Tensor) -> torch.Tensor:
        rests = [(heads.value[j] - value).T @ heads.output[j] for j in range(4)]
        return sum((torch.trace(rest.T @ moment @ rest) for rest in rests), torch.zeros(()))

    value = merged.value[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(value), value)
    assert gradient.abs().max() < 1e-5 * float(loss(value.detach()))


def _value_loss(before: AttentionHeads, after: AttentionHeads, moment: torch.Tensor) -> float:
    """What the shared V loses at the outputs, for every head alone: the objective of the merge, by its definition."""
    total = 0.0
    for head in range(before.query.shape[0]):
        kv_before = head * before.value.shape[0] // before.query.shape[0]
        kv_after = head * after.value.shape[0] // after.query.shape[0]
        rest = before.value[kv_before].T @ before.output[head] - after.value[kv_after].T @ after.output[head]
        total += float(torch.trace(rest.T @ moment @ rest))
    return total


def test_value_merge_is_optimal() -> None:
    """No small change of V and O lowers the loss, and the explained share is the loss by definition."""
    shape = Shape(queries=4, kv=4, bias=True)
    heads, moment = random_heads(shape), random_moment(shape)
    result = merge_subspace(heads, 1, rotary=SCHEMES["rope, half-split"], moment=moment)
    nothing = replace(result.heads, value=torch.zeros_like(result.heads.value))
    whole, best = _value_loss(heads, nothing, moment), _value_loss(heads, result.heads, moment)
    assert 1 - best / whole == pytest.approx(float(result.value_explained), abs=1e-6)
    generator = torch.Generator().manual_seed(6)
    for _ in range(50):
        value = torch.randn(result.heads.value.shape, generator=generator, dtype=torch.float64)
        output = torch.randn(result.heads.output.shape, generator=generator, dtype=torch.float64)
        for size in (1e-3, 1e-2):
            moved = replace(
                result.heads, value=result.heads.value + size * value, output=result.heads.output + size * output
            )
            assert _value_loss(heads, moved, moment) > best
    assert best < _value_loss(heads, merge_aligned(heads, 1, rotary=Rotary(8), moment=moment).heads, moment)


def test_rotary_key_merge_is_optimal_at_every_frequency() -> None:
    """Against a grid of all phases and ratios: two heads of one frequency, one shared key direction in the plane."""
    shape = Shape(queries=2, kv=2, dim=2, width=3)
    heads, moment = random_heads(shape), random_moment(shape)
    result = merge_subspace(heads, 1, rotary=Rotary(2), moment=moment)
    keys = torch.complex(heads.key[:, 0], heads.key[:, 1])
    queries = torch.complex(heads.query[:, 0], heads.query[:, 1])
    moment_c = moment.to(keys.dtype)
    power = torch.einsum("he,ef,hf->h", queries, moment_c, queries.conj()).real
    best = 0.0
    for angle in torch.linspace(0, 3.1416, 181, dtype=torch.float64):
        for mix in torch.linspace(0, 1.5708, 91, dtype=torch.float64):
            direction = torch.stack([torch.cos(mix) + 0j, torch.sin(mix) * torch.exp(2j * angle)])
            shared = (direction.conj()[:, None] * power.sqrt()[:, None] * keys).sum(0)
            best = max(best, float((shared @ moment_c @ shared.conj()).real))
    whole = float((power * torch.einsum("he,ef,hf->h", keys, moment_c, keys.conj()).real).sum())
    assert float(result.key_explained) == pytest.approx(best / whole, rel=1e-3)


def test_key_energy_is_restored() -> None:
    """The mean square of scores at random distances is that of the group before."""
    shape, rotary = Shape(queries=4, kv=4), SCHEMES["rope, half-split"]
    heads, moment = random_heads(shape), random_moment(shape)
    merged = merge_subspace(heads, 1, rotary=rotary, moment=moment).heads

    def energy(layer: AttentionHeads) -> float:
        total = 0.0
        for head in range(4):
            query, key = layer.query[head], layer.key[head % layer.key.shape[0]]
            for a in range(4):
                powers = [sum(float(w[i] @ moment @ w[i]) for i in (a, a + 4)) for w in (query, key)]
                total += powers[0] * powers[1]
        return total

    assert energy(merged) == pytest.approx(energy(heads), rel=1e-6)


def test_calibration_matters() -> None:
    shape, rotary = Shape(queries=4, kv=4), SCHEMES["no rope"]
    heads, moment = random_heads(shape), random_moment(shape)
    losses = [
        _value_loss(heads, merge_subspace(heads, 1, rotary=rotary, moment=m).heads, moment) for m in (moment, None)
    ]
    assert losses[0] < 0.9 * losses[1]


@pytest.mark.parametrize("merge", [merge_subspace, merge_aligned])
def test_bad_requests_are_refused(merge: object) -> None:
    assert callable(merge)
    heads = random_heads(Shape())
    with pytest.raises(ValueError, match="must divide"):
        merge(heads, 3, rotary=Rotary(8))
    with pytest.raises(ValueError, match="must divide"):
        merge(heads, 0, rotary=Rotary(8))
    with pytest.raises(ValueError, match="rotated dimensions"):
        merge(heads, 2, rotary=Rotary(10))
    with pytest.raises(ValueError, match="second moment"):
        merge(heads, 2, rotary=Rotary(8), moment=torch.eye(19, dtype=torch.float64))
    with pytest.raises(ValueError, match="NaN"):
        merge(heads, 2, rotary=Rotary(8), moment=torch.full((20, 20), torch.nan, dtype=torch.float64))


@st.composite
def layers(draw: st.DrawFn) -> tuple[AttentionHeads, int, Rotary, torch.Tensor | None, Shape]:
    target, size, per_kv = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    dim = draw(st.integers(1, 7))
    shape = Shape(
        queries=target * size * per_kv,
        kv=target * size,
        dim=dim,
        value_dim=draw(st.integers(1, 6)),
        width=draw(st.integers(1, 12)),
        bias=draw(st.booleans()),
    )
    rotary = Rotary(
        2 * draw(st.integers(0, dim // 2)),
        draw(st.booleans()),
        draw(st.sampled_from(KeyFreedom)),
        values_free=draw(st.booleans()),
    )
    heads = random_heads(shape, draw(st.integers(0, 1000)))
    for part in ("query", "key", "value", "output"):
        damage = draw(st.sampled_from(["none", "none", "zero head", "all zero", "duplicates", "tiny", "huge"]))
        tensor = getattr(heads, part).clone()
        if damage == "zero head":
            tensor[draw(st.integers(0, len(tensor) - 1))] = 0
        elif damage == "all zero":
            tensor.zero_()
        elif damage == "duplicates":
            tensor[:] = tensor[0]
        elif damage in ("tiny", "huge"):
            tensor *= 1e-30 if damage == "tiny" else 1e15
        heads = replace(heads, **{part: tensor})
    columns = heads.key.shape[2]
    kind = draw(st.sampled_from(["none", "full", "singular", "zero"]))
    moment = None
    if kind != "none":
        rank = {"full": 3 * columns, "singular": max(1, columns // 3), "zero": 0}[kind]
        inputs = random_inputs(shape, rank, 7) if rank else torch.zeros(1, columns, dtype=torch.float64)
        moment = inputs.T @ inputs / max(1, rank)
    return heads, target, rotary, moment, shape


def _is_sane(result: MergeResult, heads: AttentionHeads, target: int) -> None:
    merged = result.heads
    assert merged.query.shape == heads.query.shape
    assert merged.output.shape == heads.output.shape
    assert merged.key.shape == (target, *heads.key.shape[1:])
    assert merged.value.shape == (target, *heads.value.shape[1:])
    for part in (merged.query, merged.key, merged.value, merged.output, result.key_explained, result.value_explained):
        assert torch.isfinite(part).all()
        assert part.dtype is torch.float64
    for share in (result.key_explained, result.value_explained):
        assert share.shape == (target,)
        assert ((share >= 0) & (share <= 1)).all()


@SMALL
@given(layers())
def test_any_layer_merges_to_finite_heads(
    layer: tuple[AttentionHeads, int, Rotary, torch.Tensor | None, Shape],
) -> None:
    heads, target, rotary, moment, _ = layer
    _is_sane(merge_subspace(heads, target, rotary=rotary, moment=moment), heads, target)
    _is_sane(merge_aligned(heads, target, rotary=rotary, moment=moment), heads, target)


@SMALL
@given(layers())
def test_bases_of_the_source_do_not_matter(
    layer: tuple[AttentionHeads, int, Rotary, torch.Tensor | None, Shape],
) -> None:
    """The merge sees the function, not how it is written: bases that cancel give the same explained shares."""
    _, target, rotary, moment, shape = layer
    rotary = Rotary(rotary.dim, rotary.interleaved)
    heads = random_heads(shape, 11)
    turned = change_key_basis(heads, free_key_basis(rotary, shape.dim, shape.kv))
    turned = change_value_basis(turned, free_key_basis(Rotary(0), shape.value_dim, shape.kv))
    shares = [merge_subspace(each, target, rotary=rotary, moment=moment) for each in (heads, turned)]
    torch.testing.assert_close(shares[0].key_explained, shares[1].key_explained, atol=1e-4, rtol=0)
    torch.testing.assert_close(shares[0].value_explained, shares[1].value_explained, atol=1e-4, rtol=0)


@SMALL
@given(layers())
def test_duplicated_heads_merge_without_loss(
    layer: tuple[AttentionHeads, int, Rotary, torch.Tensor | None, Shape],
) -> None:
    _, target, rotary, moment, shape = layer
    heads = random_heads(shape, 12)
    first = [head - head % (shape.kv // target) for head in range(shape.kv)]
    heads = replace(heads, key=heads.key[first], value=heads.value[first])
    inputs = random_inputs(shape)
    if moment is not None:
        # Where the moment is next to singular, float64 does not hold what happens to inputs that it says never come.
        values, vectors = torch.linalg.eigh(moment)
        inputs = inputs @ vectors @ values.clamp_min(0).sqrt().diag() @ vectors.T
    wanted = attention(heads, inputs, rotary)
    for merge in (merge_subspace, merge_aligned):
        found = attention(merge(heads, target, rotary=rotary, moment=moment).heads, inputs, rotary)
        assert float((found - wanted).abs().max()) < 1e-5 * max(1.0, float(wanted.abs().max()))
