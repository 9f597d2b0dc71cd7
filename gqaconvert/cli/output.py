"""Printing: data to stdout, notes and progress to stderr, and nothing decorative into a pipe."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def note(text: str) -> None:
    """A line for people, on stderr."""
    print(text, file=sys.stderr)


def safe(text: str) -> str:
    """Text from a checkpoint, fit for a terminal: no control characters, no markup."""
    from rich.markup import escape

    return escape("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text))


@contextmanager
def byte_progress(label: str, *, show: bool) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A bar with throughput and time left on stderr, if it is a terminal; gives (set total, advance)."""
    if not (show and sys.stderr.isatty()):
        yield (lambda total: None), (lambda nbytes: None)
        return
    from rich.console import Console
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
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(label, total=None)
        yield (
            (lambda total: progress.update(task, total=total)),
            (lambda nbytes: progress.advance(task, nbytes)),
        )
