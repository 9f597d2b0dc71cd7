"""Rounding and distances of stored numbers, against exact rational arithmetic and the known bit patterns."""

from fractions import Fraction

import pytest
import torch

from gqaconvert.validation.numbers import from_ordinals, nearest, ordinals


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nearest_rounds_once(dtype: torch.dtype) -> None:
    """Midpoints, and values so near to them that float32 cannot tell."""
    ones = torch.arange(1.0, 2.0, 1 / 64, dtype=torch.float64)
    gap = torch.finfo(dtype).eps
    values = torch.cat([sign * (ones + gap / 2 + off) for sign in (1, -1) for off in (0.0, 2.0**-40, -(2.0**-40))])
    for value, found in zip(values.tolist(), nearest(values, dtype).tolist(), strict=True):
        steps = Fraction(value) / Fraction(gap)
        assert Fraction(found) == round(steps) * Fraction(gap)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_ordinals_count_the_floats(dtype: torch.dtype) -> None:
    values = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=dtype)
    places = ordinals(values)
    assert torch.equal(from_ordinals(places, dtype), values)
    between = round(1 / torch.finfo(dtype).eps)
    assert (places[4] - places[3]).item() == between
    assert (places[1] - places[0]).item() == between
    assert ordinals(torch.tensor([torch.finfo(dtype).tiny * torch.finfo(dtype).eps], dtype=dtype)).item() == 1
