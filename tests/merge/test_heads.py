import pytest
import torch

from gqaconvert.merge.heads import AttentionHeads, Rotary, change_key_basis, change_value_basis, permute_heads
from tests.merge.attention import attention
from tests.merge.cases import SCHEMES, Shape, free_key_basis, random_heads, random_inputs


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_changes_of_basis_keep_the_function(name: str, bias: bool) -> None:
    shape, rotary = Shape(bias=bias), SCHEMES[name]
    heads, inputs = random_heads(shape), random_inputs(shape)
    changed = change_key_basis(heads, free_key_basis(rotary, shape.dim, shape.kv))
    changed = change_value_basis(changed, free_key_basis(Rotary(0), shape.value_dim, shape.kv))
    assert not torch.allclose(changed.key, heads.key)
    torch.testing.assert_close(
        attention(changed, inputs, rotary), attention(heads, inputs, rotary), atol=1e-9, rtol=1e-9
    )


def test_key_basis_of_the_other_pairing_changes_the_function() -> None:
    shape = Shape()
    heads, inputs = random_heads(shape), random_inputs(shape)
    changed = change_key_basis(heads, free_key_basis(SCHEMES["rope, interleaved"], shape.dim, shape.kv))
    rotary = SCHEMES["rope, half-split"]
    assert (attention(changed, inputs, rotary) - attention(heads, inputs, rotary)).abs().max() > 1e-2


def test_order_of_kv_heads_is_free_with_their_queries() -> None:
    shape, rotary = Shape(queries=6, kv=3), SCHEMES["rope, half-split"]
    heads, inputs = random_heads(shape), random_inputs(shape)
    moved = permute_heads(heads, [2, 0, 1])
    torch.testing.assert_close(moved.query[:2], heads.query[4:])
    torch.testing.assert_close(attention(moved, inputs, rotary), attention(heads, inputs, rotary), atol=1e-9, rtol=1e-9)
    with_alibi = [attention(layer, inputs, Rotary(0), alibi=True) for layer in (heads, moved)]
    assert (with_alibi[0] - with_alibi[1]).abs().max() > 1e-3


@pytest.mark.parametrize("order", [[0, 1], [0, 0, 1], [0, 1, 3]])
def test_order_must_be_a_permutation(order: list[int]) -> None:
    with pytest.raises(ValueError, match="no permutation"):
        permute_heads(random_heads(Shape(queries=6, kv=3)), order)


@pytest.mark.parametrize(
    "shapes",
    [
        ((4, 8, 20), (3, 8, 20), (3, 6, 20), (4, 6, 20)),
        ((4, 8, 20), (2, 6, 20), (2, 6, 20), (4, 6, 20)),
        ((4, 8, 20), (2, 8, 20), (1, 6, 20), (4, 6, 20)),
        ((4, 8, 20), (2, 8, 20), (2, 6, 20), (4, 8, 20)),
        ((4, 8, 20), (2, 8, 20), (2, 6, 21), (4, 6, 20)),
        ((4, 8, 20), (0, 8, 20), (0, 6, 20), (4, 6, 20)),
    ],
)
def test_shapes_that_are_no_attention_are_refused(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="no attention"):
        AttentionHeads(*(torch.zeros(shape) for shape in shapes))


def test_odd_rotary_dim_is_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        Rotary(3)
