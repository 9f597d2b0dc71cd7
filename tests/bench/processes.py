"""What a child process costs, and where its files are when it starts."""

import os
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


class Cost(NamedTuple):
    """Of one process: seconds on the clock, of processors, and peak resident bytes (page cache not included)."""

    wall: float
    processor: float
    memory: int


def timed(command: list[str]) -> Cost:
    """Run a command to its end."""
    started = time.monotonic()
    process = subprocess.Popen(command)
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit(f"failed: {command}")
    return Cost(time.monotonic() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def evict(files: Iterable[str | Path]) -> None:
    """Drop files from the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
