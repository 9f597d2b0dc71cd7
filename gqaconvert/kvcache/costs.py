"""Bounds on decoding and the price of uptraining: closed forms, no measurements."""

from dataclasses import dataclass

from gqaconvert.errors import InputError
from gqaconvert.units import GIB


@dataclass(frozen=True)
class Gpu:
    """Published figures of an accelerator.

    Attributes:
        name: as on the command line.
        memory: bytes.
        bandwidth: bytes a second, None if only the memory is known.
        flops: dense bfloat16 operations a second.
    """

    name: str
    memory: int
    bandwidth: float | None = None
    flops: float | None = None


# Nominal peak figures as commonly quoted (dense bfloat16, no sparsity), not measured here. The bytes read are in the
# JSON, so that any other bandwidth gives its own bound.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100-40", 40 * GIB, 1.555e12, 312e12),
        Gpu("a100", 80 * GIB, 2.039e12, 312e12),
        Gpu("h100", 80 * GIB, 3.35e12, 989e12),
        Gpu("h200", 141 * 10**9, 4.8e12, 989e12),
        Gpu("l4", 24 * 10**9, 0.3e12, 121e12),
        Gpu("l40s", 48 * 10**9, 0.864e12, 362e12),
        Gpu("rtx4090", 24 * GIB, 1.008e12, 165e12),
        Gpu("tpu-v4", 32 * GIB, 1.2e12, 275e12),
    )
}


@dataclass(frozen=True)
class DecodeBound:
    """The least time that one decoding step of the whole batch can take (Williams et al. 2009, roofline).

    Attributes:
        bytes_read: on each device: its weights once, its cache once.
        flops: on each device: 2 for each weight and sequence, 2 for each cached element a query head meets.
        seconds: the longer of reading and computing, None without a bandwidth. Transfers between devices cost nothing
            here, so this is a bound, not a forecast.
        intensity: operations for each byte read.
        bound_by: "memory" or "compute".
    """

    bytes_read: int
    flops: int
    seconds: float | None
    intensity: float
    bound_by: str | None


def decode_bound(gpu: Gpu | None, bytes_read: int, flops: int) -> DecodeBound:
    """The bound of one step."""
    intensity = flops / max(bytes_read, 1)
    if gpu is None or gpu.bandwidth is None or gpu.flops is None:
        return DecodeBound(bytes_read, flops, None, intensity, None)
    reading, computing = bytes_read / gpu.bandwidth, flops / gpu.flops
    return DecodeBound(
        bytes_read, flops, max(reading, computing), intensity, "memory" if reading >= computing else "compute"
    )


@dataclass(frozen=True)
class UptrainingCost:
    """What continuing the pre-training for a part of it takes.

    Attributes:
        alpha: that part; the paper (section 3.1) takes 0.05.
        tokens: alpha x the tokens of the pre-training.
        flops: 6 for each parameter and token (Kaplan et al. 2020, section 2.1), attention scores not counted.
        gpu_hours: at ``utilisation`` of the accelerator's dense bfloat16 peak; None if that is not known.
        utilisation: assumed.
    """

    alpha: float
    tokens: int
    flops: int
    gpu_hours: float | None
    utilisation: float


def uptraining_cost(
    parameters: int, alpha: float, pretrain_tokens: int, gpu: Gpu | None, utilisation: float = 0.4
) -> UptrainingCost:
    """Cost of uptraining.

    Raises:
        InputError: alpha is no part.
    """
    if not 0 < alpha <= 1:
        raise InputError(f"--alpha {alpha}: it is a part of the pre-training, in (0, 1]")
    tokens = round(alpha * pretrain_tokens)
    flops = 6 * parameters * tokens
    hours = flops / (gpu.flops * utilisation) / 3600 if gpu and gpu.flops else None
    return UptrainingCost(alpha, tokens, flops, hours, utilisation)
