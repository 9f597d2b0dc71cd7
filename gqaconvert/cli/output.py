"""Printing: data to stdout, notes and progress to stderr, and nothing decorative into a pipe."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout. ASCII only: names from a checkpoint may hold what terminals or pipes choke on."""
    print(json.dumps(document, indent=2))


def note(text: str) -> None:
    """A line for people, on stderr, whatever a checkpoint put into it."""
    print(printable(text), file=sys.stderr)


def printable(text: str, limit: int = 2000) -> str:
    """Text that may come from a checkpoint, as one line for a terminal: no control characters, of bounded length."""
    shown = text if len(text) <= limit else f"{text[: limit - 3]}..."
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in shown)


def new_console(*, stderr: bool = False) -> "Console":
    """Rich's console for tables and bars. It does not decide what a pipe without a reader means: the group does."""
    from rich.console import Console

    class OneOfOurs(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return OneOfOurs(stderr=stderr, highlight=False)


def safe(text: str) -> str:
    """Printable text for a rich table: no markup either."""
    from rich.markup import escape

    return escape(printable(text))


@contextmanager
def byte_progress(label: str, *, show: bool) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A bar with throughput and time left on stderr, if it is a terminal; gives (set total, advance)."""
    if not (show and sys.stderr.isatty()):
        yield (lambda total: None), (lambda nbytes: None)
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=new_console(stderr=True)) as progress:
        task = progress.add_task(label, total=None)
        yield (
            (lambda total: progress.update(task, total=total)),
            (lambda nbytes: progress.advance(task, nbytes)),
        )


@contextmanager
def count_progress(label: str, *, show: bool) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A bar of things that are counted, on stderr if it is a terminal; gives (add to the total, advance)."""
    if not (show and sys.stderr.isatty()):
        yield (lambda total: None), (lambda count: None)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=new_console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield (
            (lambda total: progress.update(task, total=(progress.tasks[0].total or 0) + total)),
            (lambda count: progress.advance(task, count)),
        )
