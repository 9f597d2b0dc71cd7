"""Reading byte ranges of a plan's sources."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, BinaryIO

from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.errors import CheckpointError
from gqaconvert.planning import WORK, ByteRange, ColumnRange, Place

if TYPE_CHECKING:
    from torch import Tensor


class SourceReader(ExitStack):
    """The source's shards and the work files, each opened once; for any number of threads."""

    def __init__(self, folder: LocalFolder, staging_folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._staging_folder = staging_folder
        self._files: dict[str, BinaryIO] = {}
        self._opening, self._turning = Lock(), Lock()
        self._matrix: tuple[ByteRange, Tensor] | None = None  # the last one that was read by columns

    def descriptor(self, shard: str) -> int:
        """An open file."""
        with self._opening:
            if shard not in self._files:
                path = self._staging_folder / shard if shard.startswith(WORK) else self._folder.path(shard)
                self._files[shard] = self.enter_context(path.open("rb", buffering=0))
            return self._files[shard].fileno()

    def read(self, place: Place, offset: int = 0, count: int | None = None) -> bytearray:
        """Bytes of a range, or a part of it (of whole elements)."""
        if isinstance(place, ColumnRange):
            return self._read_columns(place, offset, place.nbytes if count is None else count)
        data = bytearray(place.nbytes if count is None else count)
        view, start = memoryview(data), place.start + offset
        while view:
            done = os.preadv(self.descriptor(place.shard), [view], start)
            if done == 0:
                raise CheckpointError(f"{place.shard} became shorter while it was read")
            view, start = view[done:], start + done
        return data

    def _read_columns(self, place: ColumnRange, offset: int, count: int) -> bytearray:
        import torch

        kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[place.itemsize]
        whole = ByteRange(place.shard, place.start, place.height * place.width * place.itemsize)
        with self._turning:
            if self._matrix is None or self._matrix[0] != whole:
                self._matrix = whole, torch.frombuffer(self.read(whole), dtype=kind).view(place.height, place.width)
            matrix = self._matrix[1]
        rows = matrix[:, place.first : place.first + place.columns].T
        # Only as many of them as are asked for are copied together.
        start, stop = offset // place.itemsize, (offset + count) // place.itemsize
        first, last = start // place.height, -(-stop // place.height)
        data = bytearray(count)
        part = rows[first:last].flatten()[start - first * place.height : stop - first * place.height]
        torch.frombuffer(data, dtype=kind).copy_(part)
        return data
