"""Conversions killed with SIGKILL at random moments: what is left, and whether ``--resume`` makes it whole.

    python -m tests.bench.kill --runs 100 --gib 0.05 --dir /path/with/space

Every run is a process of its own, forked from a server that has torch loaded, so that the kills fall on the
conversion and not on seconds of imports. Half of the runs write to a new destination, half replace an older model
(``--overwrite``). After every kill the destination must not exist, or be the old model, or be the finished new one,
byte for byte; afterwards ``--resume`` must end with the bytes of an undisturbed run, and leave nothing beside it.
Prints a table and exits with 1 on any fault.
"""

import argparse
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from gqaconvert.cli.app import app
from tests.support.checkpoints import big_llama_checkpoint

OPTIONS = ("--kv-heads", "2", "--quiet")
# Not huggingface_hub: a process has one fork server for all, and the client reads its endpoint when it is imported.
_PRELOADED = (
    "gqaconvert.cli.app", "gqaconvert.conversion", "gqaconvert.merge.execute",
    "tests.support.checkpoints",
)  # fmt: skip


class Outcome(NamedTuple):
    """What one killed run left.

    Attributes:
        mode: "new" or "overwrite".
        seconds: from the start to the kill.
        left: "nothing", "staging", "complete", or "BROKEN" with what is wrong.
        resumed: "identical", or what went wrong.
    """

    mode: str
    seconds: float
    left: str
    resumed: str


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run_command(arguments: list[str]) -> None:
    """Run the command line; a child process's target."""
    app(arguments)


def forked(*arguments: object) -> ForkServerProcess:
    """Start a command in a process that has all imports behind it."""
    context = get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    process = context.Process(target=run_command, args=([str(argument) for argument in arguments],))
    process.start()
    return process


def convert(source: Path, target: Path, *options: str) -> ForkServerProcess:
    """Start a conversion."""
    return forked("convert", source, target, *OPTIONS, *options)


def whole(source: Path, target: Path, *options: str) -> float:
    """Convert without disturbance; returns the seconds it took."""
    started = time.monotonic()
    process = convert(source, target, *options)
    process.join()
    assert process.exitcode == 0
    return time.monotonic() - started


def study(source: Path, scratch: Path, *, runs: int, seed: int) -> Iterator[Outcome]:
    """Kill ``runs`` conversions of ``source``, at moments spread evenly over the time that one takes."""
    whole(source, scratch / "older", "--method", "first")  # also starts the server
    longest = whole(source, scratch / "reference")
    new, old = contents(scratch / "reference"), contents(scratch / "older")
    assert old != new
    moments = random.Random(seed)
    for run in range(runs):
        mode = ("new", "overwrite")[run % 2]
        folder = scratch / f"run-{run}"
        target = folder / "model"
        folder.mkdir()
        if mode == "overwrite":
            shutil.copytree(scratch / "older", target)
        options = ("--overwrite",) if mode == "overwrite" else ()
        # Strata: a handful of runs still covers the start, the middle and the end.
        seconds = longest * (run + moments.random()) / runs
        process = convert(source, target, *options)
        time.sleep(seconds)
        process.kill()
        process.join()
        left = _left(target, {"old": old} if mode == "overwrite" else {}, new)
        yield Outcome(mode, seconds, left, _resume(source, target, options, new))
        shutil.rmtree(folder)


def _left(target: Path, others: dict[str, dict[str, bytes]], new: dict[str, bytes]) -> str:
    beside = any(path != target for path in target.parent.iterdir())
    if not target.exists():
        return "BROKEN: the old model is gone" if others else "staging" if beside else "nothing"
    found = contents(target)
    if found == new:
        return "complete"
    if found in others.values():
        return "staging" if beside else "nothing"
    return "BROKEN: a destination that is neither old nor new"


def _resume(source: Path, target: Path, options: tuple[str, ...], new: dict[str, bytes]) -> str:
    process = convert(source, target, "--resume", *options)
    process.join()
    if process.exitcode:
        return f"exit {process.exitcode}"
    if contents(target) != new:
        return "other bytes"
    beside = [path.name for path in target.parent.iterdir() if path != target]
    return f"left behind: {beside}" if beside else "identical"


def main() -> None:
    """Generate, kill, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--gib", type=float, default=0.05)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dir", type=Path, default=Path("/tmp/gqaconvert-kill"))
    arguments = parser.parse_args()
    shutil.rmtree(arguments.dir, ignore_errors=True)
    source = big_llama_checkpoint(arguments.dir / "source", arguments.gib, arguments.shards)
    outcomes = list(study(source, arguments.dir, runs=arguments.runs, seed=arguments.seed))
    table = Table(title=f"{arguments.runs} runs killed, {arguments.gib:g} GiB in {arguments.shards} shards")
    for column in ("mode", "left by the kill", "--resume", "runs", "killed after s"):
        table.add_column(column)
    for (mode, left, resumed), count in sorted(Counter((o.mode, o.left, o.resumed) for o in outcomes).items()):
        times = [o.seconds for o in outcomes if (o.mode, o.left, o.resumed) == (mode, left, resumed)]
        table.add_row(mode, left, resumed, str(count), f"{min(times):.2f} to {max(times):.2f}")
    Console().print(table)
    faults = [o for o in outcomes if o.left.startswith("BROKEN") or o.resumed != "identical"]
    print(f"{len(faults)} faults")
    shutil.rmtree(arguments.dir)
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
