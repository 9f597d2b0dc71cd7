"""Reading shards at offsets, into memory that begins at a page. No torch until a tensor is asked for."""

import ctypes
import math
import os
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import TYPE_CHECKING

from gqaconvert.checkpoint.dtypes import BITS, TORCH_NAMES
from gqaconvert.checkpoint.headers import TensorEntry, Transposed
from gqaconvert.errors import StorageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Buffer:
    """Memory of its own pages.

    Kernels copy from the page cache four to five times faster into it than to the first bytes after a page's begin,
    where malloc puts a large bytearray (measured on an AMD EPYC, Linux 6: 10 against 2 GiB/s).
    """

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap(-1, max(1, nbytes))
        self.view = memoryview(self.memory)[:nbytes]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


_memcmp = ctypes.CDLL(None).memcmp  # compares beside other threads, which == between bytes does not
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def first_difference(left: Buffer, right: Buffer, nbytes: int) -> int | None:
    """The first place at which the first ``nbytes`` bytes differ, None if they do not."""

    def same(start: int, end: int) -> bool:
        return bool(_memcmp(left.address + start, right.address + start, end - start) == 0)

    if same(0, nbytes):
        return None
    start, end = 0, nbytes
    while end - start > 1:
        middle = (start + end) // 2
        start, end = (middle, end) if same(start, middle) else (start, middle)
    return start


@dataclass
class Shards:
    """Shards of one folder, opened once. For one thread."""

    root: Path
    descriptors: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> "Shards":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)
        self.descriptors.clear()

    def fill(self, shard: str, start: int, target: memoryview) -> None:
        """Read a part of a file.

        Raises:
            StorageError: it cannot be read.
        """
        try:
            if shard not in self.descriptors:
                self.descriptors[shard] = os.open(self.root / shard, os.O_RDONLY)
            while target:
                done = os.preadv(self.descriptors[shard], [target], start)
                if done == 0:
                    raise StorageError(f"{self.root / shard} ended while it was read")
                target, start = target[done:], start + done
        except OSError as error:
            raise StorageError(f"cannot read {self.root / shard}: {error.strerror}") from error

    def rows(self, entry: TensorEntry, start: int, count: int, row_size: int, buffer: Buffer | None = None) -> "Tensor":
        """Rows of a tensor in its stored type: (count, row_size); in ``buffer``, until that is used again."""
        import torch

        if isinstance(entry, Transposed):
            stored = TensorEntry(*entry)._replace(shape=entry.shape[::-1])
            return self.tensor(stored).T[start : start + count]
        row_bytes = row_size * BITS[entry.dtype] // 8
        if not count * row_bytes:
            return torch.empty((count, row_size), dtype=torch_type(entry.dtype))
        view = (buffer or Buffer(count * row_bytes)).view[: count * row_bytes]
        self.fill(entry.shard, entry.start + start * row_bytes, view)
        return torch.frombuffer(view, dtype=torch_type(entry.dtype)).view(count, row_size)

    def tensor(self, entry: TensorEntry) -> "Tensor":
        """A whole tensor in its stored type."""
        rows = entry.shape[0] if entry.shape else 1
        return self.rows(entry, 0, rows, math.prod(entry.shape) // max(1, rows)).reshape(entry.shape)


def torch_type(name: str) -> "torch.dtype":
    """Torch's type for a safetensors name of a float."""
    import torch

    dtype = getattr(torch, TORCH_NAMES[name])
    assert isinstance(dtype, torch.dtype)
    return dtype
