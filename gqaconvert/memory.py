"""How much memory there is still to have."""

from contextlib import suppress
from pathlib import Path

from gqaconvert.errors import EnvironmentFailure
from gqaconvert.units import format_size

_CGROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "total_inactive_file",
    ),
)  # fmt: skip
"""Versions 2 and 1: a container's limit, what it uses, and the page cache in that which gives way (memory.stat)."""


def free_memory() -> int | None:
    """Bytes that can be had without swapping, of the machine (Linux: MemAvailable) or of the container if that is less.

    None where the system does not tell.
    """
    try:
        machine = _fields(Path("/proc/meminfo"))["MemAvailable:"] * 1024
    except (OSError, KeyError, ValueError):
        return None
    free = [machine]
    for limit, used, cache in _CGROUPS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            left = int(Path(limit).read_text(encoding="ascii")) - int(Path(used).read_text(encoding="ascii"))
            free.append(left + _fields(Path(used).with_name("memory.stat")).get(cache, 0))
    return max(0, min(free))


def _fields(path: Path) -> dict[str, int]:
    lines = (line.split() for line in path.read_text(encoding="ascii").splitlines())
    return {words[0]: int(words[1]) for words in lines}


def require_memory(needed: int, what: str, *, hint: str) -> None:
    """Refuse what would be killed for want of memory later.

    Raises:
        EnvironmentFailure: fewer than ``needed`` bytes are free.
    """
    free = free_memory()
    if free is not None and needed > free:
        raise EnvironmentFailure(
            f"{what} needs {format_size(needed)} of memory, {format_size(free)} are free", hint=hint
        )
