"""Apply a pooling method to the bytes of one group's heads, in slices of bounded memory."""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gqaconvert.checkpoint.dtypes import BITS, TORCH_NAMES
from gqaconvert.errors import CheckpointError
from gqaconvert.merge.pooling import PoolContext, Pooling, Role
from gqaconvert.merge.rounding import round_once

_SLICE_ELEMENTS = 2**18
"""Elements of all heads of a group that are in memory at once: 2 MiB in float64, which caches hold."""

Read = Callable[[int, int], bytearray]
"""(byte offset within a head, number of bytes) -> the bytes."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Slices are small: a second thread of torch's would gain little, and wait for the ones that copy and hash."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def torch_dtype(name: str) -> torch.dtype:
    """Torch's type for a safetensors name."""
    dtype = getattr(torch, TORCH_NAMES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype


def pool_heads(
    readers: list[Read],
    *,
    shape: tuple[int, int],
    source_dtype: str,
    target_dtype: str,
    pooling: Pooling,
    role: Role,
    key: str,
    seed: int,
    initializer_range: float,
) -> Iterator[memoryview]:
    """Bytes of one output head, slice by slice.

    Args:
        readers: one for each head of the group.
        shape: (rows, row size) of a head.
        source_dtype: safetensors name of what the readers give.
        target_dtype: safetensors name of the result.
        pooling: the method.
        role: what kind of rows they are.
        key: name of the output head; with ``seed`` it decides what a drawing method draws.
        seed: of the run.
        initializer_range: std of fresh weights.

    Raises:
        CheckpointError: the result is not finite.
    """
    rows, row_size = shape
    digest = hashlib.sha256(f"{seed}/{key}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    context = PoolContext(role, source_dtype == "F64", generator, initializer_range)
    row_bytes = row_size * BITS[source_dtype] // 8
    step = max(1, _SLICE_ELEMENTS // (len(readers) * row_size))
    for row in range(0, rows, step):
        count = min(step, rows - row)
        heads = torch.empty((len(readers), count, row_size), dtype=torch.float64)
        for head, read in zip(heads, readers, strict=True):
            data = torch.frombuffer(read(row * row_bytes, count * row_bytes), dtype=torch_dtype(source_dtype))
            head.copy_(data.view(count, row_size))
        yield _stored(pooling(heads, context), target_dtype, key)


def cast(data: bytearray, source_dtype: str, target_dtype: str, name: str) -> memoryview:
    """The same values in another type.

    Raises:
        CheckpointError: a value does not fit.
    """
    values = torch.frombuffer(data, dtype=torch_dtype(source_dtype))
    return _stored(values.to(torch.float64) if source_dtype == "F64" else values, target_dtype, name)


def turned(data: bytes, dtype: str, rows: int, row_size: int) -> memoryview:
    """A matrix (rows, row_size) by its columns."""
    kind = torch_dtype(dtype)
    result = bytearray(len(data))
    matrix = torch.frombuffer(bytearray(data), dtype=kind).view(rows, row_size)
    torch.frombuffer(result, dtype=kind).view(row_size, rows).copy_(matrix.T)
    return memoryview(result)


def _stored(values: Tensor, dtype: str, name: str) -> memoryview:
    target = torch_dtype(dtype)
    stored = round_once(values, target) if values.dtype is torch.float64 else values.to(target)
    if not _all_finite(stored):
        fault = "NaN or infinite values" if not torch.isfinite(values).all() else f"values beyond {TORCH_NAMES[dtype]}"
        raise CheckpointError(
            f"{name} has {fault}", hint="'gqaconvert inspect --check' lists the tensors that are not finite"
        )
    # A buffer of Python's own: torch gives none without numpy, which is no dependency.
    data = bytearray(stored.numel() * stored.element_size())
    torch.frombuffer(data, dtype=target).copy_(stored.flatten())
    return memoryview(data)


def _all_finite(values: Tensor) -> bool:
    """`torch.isfinite` on a 16-bit type takes as long as all the rest; the least and the largest say the same."""
    if values.numel() == 0:
        return True
    return all(
        math.isfinite(end.item()) for end in torch.aminmax(values.to(torch.promote_types(values.dtype, torch.float32)))
    )
