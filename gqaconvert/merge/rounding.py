"""From float64 to a stored type in one rounding."""

import torch
from torch import Tensor


def round_once(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 to ``dtype``, to nearest, ties to even.

    torch converts float64 to bfloat16 and float16 through float32, which rounds twice. Rounding to odd on the way
    (Boldo and Melquiond, IEEE TC 57(4), 2008) keeps the sticky bit, so the second rounding is the only one that counts.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return values.to(dtype)
    single = values.to(torch.float32)
    inexact = single.to(torch.float64) != values
    if inexact.any():  # a mean of few 16-bit numbers mostly fits float32
        near, true = single[inexact], values[inexact]
        away = torch.copysign(torch.full_like(near, torch.inf), (true - near.to(torch.float64)).to(torch.float32))
        odd = torch.nextafter(near, away)
        even = near.view(torch.int32) % 2 == 0
        single[inexact] = torch.where(even & torch.isfinite(near), odd, near)
    return single.to(dtype)
