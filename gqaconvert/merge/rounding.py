"""From float64 to a stored type in one rounding."""

import torch
from torch import Tensor

_SLICE = 2**16
"""Elements at a time: what caches hold."""


def round_once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to ``dtype``, to nearest, ties to even.

    torch converts float64 to bfloat16 and float16 through float32, which rounds twice. Rounding to odd on the way
    (Boldo and Melquiond, IEEE TC 57(4), 2008) keeps the sticky bit, so the second rounding is the only one that counts.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return values.to(dtype)
    stored = torch.empty(values.numel(), dtype=dtype, device=values.device)
    for exact, place in zip(torch.split(values.flatten(), _SLICE), torch.split(stored, _SLICE), strict=True):
        single = exact.to(torch.float32)
        widened = single.to(torch.float64)
        # On bit patterns, sign and magnitude: one less is the neighbour towards zero, and odd is its last bit set.
        odd = single.view(torch.int32)
        odd -= (widened.abs() > exact.abs()).to(torch.int32)
        odd |= (widened != exact).to(torch.int32)
        place.copy_(single)
    return stored.view(values.shape)
