"""Stored numbers: their bits, their distance, and the one nearest to a float64 value. Shares no code with the merge."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_SLICE = 2**18  # small enough for a processor's cache in float64: twice as fast as 4 Mi
_INTEGERS = {16: torch.int16, 32: torch.int32, 64: torch.int64}


def ordinals(values: Tensor) -> Tensor:
    """The place of each float among all floats of its type, as int64: neighbours differ by one, zero is 0."""
    bits = values.view(_INTEGERS[values.element_size() * 8]).to(torch.int64)
    return torch.where(bits >= 0, bits, -(bits & (2 ** (values.element_size() * 8 - 1) - 1)))


def from_ordinals(places: Tensor, dtype: torch.dtype) -> Tensor:
    """The floats at these places; the inverse of `ordinals` up to the sign of zero."""
    width = dtype.itemsize * 8
    bits = torch.where(places >= 0, places, -places - 2 ** (width - 1))
    return bits.to(_INTEGERS[width]).view(dtype)


def nearest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The number of ``dtype`` nearest to each float64, ties to the even one.

    torch converts to 16 bits through float32 and so may round twice. Where float32 held the value exactly, or is no
    midpoint between two numbers of ``dtype``, its answer stands; everywhere else the neighbours are looked at.
    """
    if dtype in (torch.float64, torch.float32):
        return values.to(dtype)
    single = values.to(torch.float32)
    found = single.to(dtype)
    again = single.to(torch.float64)
    if torch.equal(again, values):  # so it is for means of a few 16-bit numbers
        return found
    doubtful = again != values
    if dtype is torch.bfloat16:
        doubtful &= (single.view(torch.int32) & 0xFFFF) == 0x8000
    if doubtful.any():
        found[doubtful] = _nearest_neighbour(values[doubtful], found[doubtful])
    return found


def _nearest_neighbour(values: Tensor, found: Tensor) -> Tensor:
    """The nearest among numbers that are at most one step off and their neighbours."""
    dtype = found.dtype
    places = ordinals(found)
    best, distance = places, _distance(places, values, dtype)
    for step in (-1, 1):
        other = places + step
        away = _distance(other, values, dtype)
        closer = (away < distance) | ((away == distance) & (other % 2 == 0))
        best, distance = torch.where(closer, other, best), torch.where(closer, away, distance)
    return from_ordinals(best, dtype)


def _distance(places: Tensor, values: Tensor, dtype: torch.dtype) -> Tensor:
    distance = (from_ordinals(places, dtype).to(torch.float64) - values).abs()
    return distance.nan_to_num(nan=math.inf, posinf=math.inf)


@dataclass
class Deviation:
    """Collects how far stored numbers are from expected ones."""

    max_abs: float = 0.0
    max_ulp: int = 0
    difference: float = 0.0
    norm: float = 0.0
    finite: bool = True

    def add(self, stored: Tensor, expected: Tensor, slack: Tensor) -> None:
        """Compare a slice.

        Args:
            stored: as the output has it.
            expected: float64.
            slack: float64, how much of ``expected`` the order of a float64 sum may decide.
        """
        target = nearest(expected, stored.dtype)
        self.norm += float(torch.linalg.vector_norm(expected)) ** 2
        if torch.equal(stored, target):  # -0 and 0 are the same number
            return
        gaps = (ordinals(stored) - ordinals(target)).abs()
        self.finite = self.finite and bool(torch.isfinite(stored).all())
        exact = stored.to(torch.float64)
        # As near to the mean as the nearest number is, up to the last bit of the float64 sum: no fault.
        tie = (exact - expected).abs() <= (target.to(torch.float64) - expected).abs() + slack
        gaps = torch.where(tie, 0, gaps)
        off = torch.where(tie, 0.0, exact - target.to(torch.float64)).nan_to_num(nan=math.inf)
        self.max_ulp = max(self.max_ulp, int(gaps.max()))
        self.max_abs = max(self.max_abs, float(off.abs().max()))
        self.difference += float(off.square().sum())

    @property
    def frobenius(self) -> float:
        """Norm of the difference, relative to the norm of what was expected."""
        return math.sqrt(self.difference / self.norm) if self.norm else math.sqrt(self.difference)


def slices(rows: int, row_size: int, heads: int) -> Iterator[tuple[int, int]]:
    """(first row, rows) of slices that take 2 MiB in float64 for all heads of a group together."""
    step = max(1, _SLICE // (max(1, row_size) * max(1, heads)))
    for start in range(0, rows, step):
        yield start, min(step, rows - start)
