"""Moving bytes into new files: unchanged ranges go through the kernel, and other threads hash what was written."""

import ctypes
import errno
import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from gqaconvert.errors import CheckpointError

CHUNK = 32 * 2**20
_NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.ETXTBSY}

Advance = Callable[[int], None]


def copy_range(source: int, start: int, target: int, position: int, count: int) -> Iterator[int]:
    """Copy ``count`` bytes from ``start`` of a file to ``position`` of another (both open descriptors).

    Yields:
        The number of bytes of each step, once they are there.

    Raises:
        CheckpointError: the source ends too early.
        OSError: reading or writing fails.
    """
    kernel_copy = hasattr(os, "copy_file_range")
    end = start + count
    while start < end:
        size = min(end - start, CHUNK)
        if kernel_copy:
            try:
                done = os.copy_file_range(source, target, size, start, position)
            except OSError as error:
                if error.errno not in _NO_KERNEL_COPY:
                    raise
                kernel_copy = False
                continue
        else:
            done = write_at(target, os.pread(source, min(size, 4 * 2**20), start), position)
        if done == 0:
            raise CheckpointError("a source file became shorter while it was read")
        start += done
        position += done
        yield done


def write_at(target: int, data: bytes | memoryview, position: int) -> int:
    """Write everything; a single write may stop early. Returns the number of bytes."""
    rest = memoryview(data)
    while rest:
        done = os.pwrite(target, rest, position)
        rest, position = rest[done:], position + done
    return len(data)


class FileFinisher:
    """Threads that read files right behind their writer and hash them.

    The bytes are still in the page cache then, so the hash costs no disk and, on another core, little time. There are
    two, as copying within the kernel can be faster than hashing: the next file then need not wait for the one before.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="finish")
        self._positions: list[SimpleQueue[int | None]] = []

    def follow(self, path: Path) -> "Follower":
        """Start to follow a file that exists."""
        positions: SimpleQueue[int | None] = SimpleQueue()
        self._positions.append(positions)
        return Follower(positions, self._pool.submit(_follow, path, positions))

    def __enter__(self) -> "FileFinisher":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A Ctrl-C may come after the thread began to wait and before anybody is there to end that.
        for positions in self._positions:
            positions.put(None)
        self._pool.shutdown(wait=True, cancel_futures=True)


class Follower:
    """The writer's end: tells how far the file is. Leaving the context says that no more will be written.

    Attributes:
        digest: the sha256 in hex, once the whole file is hashed.
    """

    def __init__(self, positions: "SimpleQueue[int | None]", digest: "Future[str]") -> None:
        self._positions = positions
        self.digest = digest

    def written_to(self, position: int) -> None:
        """The file is complete up to this position."""
        self._positions.put(position)

    def __enter__(self) -> "Follower":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.digest.cancel()
        self._positions.put(None)


def _follow(path: Path, positions: "SimpleQueue[int | None]") -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(2**20))
    with path.open("rb", buffering=0) as file:
        done = 0
        while (end := positions.get()) is not None:
            while done < end:
                count = file.readinto(buffer[: min(len(buffer), end - done)])
                if not count:
                    raise CheckpointError(f"{path} became shorter while it was written")
                digest.update(buffer[:count])
                done += count
    return digest.hexdigest()


def start_writeback(path: Path, start: int, count: int) -> None:
    """Ask the kernel to begin writing a range out (Linux: sync_file_range), so that the final fsync waits for little.

    It promises nothing about durability; that is what the fsync is for. It blocks while the disk's queue is full.
    """
    if _SYNC_FILE_RANGE is not None:
        with path.open("rb") as file:
            _SYNC_FILE_RANGE(file.fileno(), start, count, 2)  # SYNC_FILE_RANGE_WRITE


def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    function: Any = getattr(ctypes.CDLL(None), "sync_file_range", None) if sys.platform.startswith("linux") else None
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    found: Callable[[int, int, int, int], int] = function
    return found


_SYNC_FILE_RANGE = _sync_file_range()


def hash_file(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_file(path: Path, data: bytes) -> None:
    """Write a small file and force it to the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_tree(root: Path) -> None:
    """Force a folder, and all that is in it, to the disk."""
    for path in (*root.rglob("*"), root):
        if path.is_dir():
            sync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Force a folder's entries to the disk, where the system can."""
    if os.name == "posix":
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
