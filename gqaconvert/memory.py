"""How much memory this machine can still give."""

from gqaconvert.errors import EnvironmentFailure
from gqaconvert.units import format_size


def free_memory() -> int | None:
    """Bytes that can be had without swapping (Linux: MemAvailable), None where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:  # noqa: PTH123
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


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
