from dataclasses import replace

import pytest
import torch

from gqaconvert.merge.align import merge_aligned
from gqaconvert.merge.heads import AttentionHeads, Rotary
from tests.merge.attention import attention
from tests.merge.cases import SCHEMES, Shape, free_key_basis, random_heads, random_inputs, random_moment


def _rotated_copies(shape: Shape, rotary: Rotary) -> AttentionHeads:
    heads = random_heads(shape)
    turn = torch.linalg.qr(free_key_basis(rotary, shape.dim, shape.kv))[0]
    turn_value = torch.linalg.qr(free_key_basis(Rotary(0), shape.value_dim, shape.kv))[0]
    if rotary.dim:  # QR of a turn and a scale is not always a turn: take the scale off instead
        turn = free_key_basis(rotary, shape.dim, shape.kv)
        scale = turn.square().sum(-2, keepdim=True).sqrt()
        turn = turn / scale
        rest = turn[:, rotary.dim :, rotary.dim :]
        turn[:, rotary.dim :, rotary.dim :] = torch.linalg.qr(rest)[0]
    first = [0, 0, 2, 2]
    return replace(heads, key=turn @ heads.key[first], value=turn_value @ heads.value[first])


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("name", SCHEMES)
def test_rotated_copies_merge_without_loss(name: str, calibrated: bool) -> None:
    shape, rotary = Shape(queries=4, kv=4), SCHEMES[name]
    heads, inputs = _rotated_copies(shape, rotary), random_inputs(shape)
    merged = merge_aligned(heads, 2, rotary=rotary, moment=random_moment(shape) if calibrated else None).heads
    torch.testing.assert_close(
        attention(merged, inputs, rotary), attention(heads, inputs, rotary), atol=1e-6, rtol=1e-6
    )


def test_norm_is_restored() -> None:
    shape = Shape(queries=4, kv=4)
    heads = random_heads(shape)
    merged = merge_aligned(heads, 1, rotary=Rotary(8)).heads
    for before, after in ((heads.key, merged.key), (heads.value, merged.value)):
        assert float(after.square().sum()) == pytest.approx(float(before.square().sum()) / 4)


def test_rotations_keep_the_norm_of_queries_and_outputs() -> None:
    shape = Shape(queries=4, kv=4)
    heads = random_heads(shape)
    merged = merge_aligned(heads, 2, rotary=Rotary(4)).heads
    for before, after in ((heads.query, merged.query), (heads.output, merged.output)):
        torch.testing.assert_close(after.square().sum((1, 2)), before.square().sum((1, 2)))
