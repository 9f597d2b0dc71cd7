"""Reading byte ranges of a plan's sources."""

import os
from contextlib import ExitStack
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.errors import CheckpointError
from gqaconvert.planning import WORK, ByteRange


class SourceReader(ExitStack):
    """The source's shards and the work files, each opened once; for any number of threads."""

    def __init__(self, folder: LocalFolder, staging_folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._staging_folder = staging_folder
        self._files: dict[str, BinaryIO] = {}
        self._opening = Lock()

    def descriptor(self, shard: str) -> int:
        """An open file."""
        with self._opening:
            if shard not in self._files:
                path = self._staging_folder / shard if shard.startswith(WORK) else self._folder.path(shard)
                self._files[shard] = self.enter_context(path.open("rb", buffering=0))
            return self._files[shard].fileno()

    def read(self, place: ByteRange, offset: int = 0, count: int | None = None) -> bytearray:
        """Bytes of a range, or a part of it."""
        data = bytearray(place.nbytes if count is None else count)
        view, start = memoryview(data), place.start + offset
        while view:
            done = os.preadv(self.descriptor(place.shard), [view], start)
            if done == 0:
                raise CheckpointError(f"{place.shard} became shorter while it was read")
            view, start = view[done:], start + done
        return data
