"""Conversion against ``cp -r``: wall time and peak memory on a generated llama-shaped checkpoint.

    python -m tests.bench.convert_speed --gib 3 --shards 4 --runs 5 --dir /path/with/space

Runs alternate, so that a noisy machine hurts all, and every other round goes backwards: deleting what the command before
left on the disk costs the next one time. Medians are compared. The peak memory is the child's own maximum
resident set (wait4), page cache not included.
"""

import argparse
import os
import shutil
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.bench.processes import evict, timed
from tests.support.checkpoints import big_llama_checkpoint


def main() -> None:
    """Generate, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dir", type=Path, default=Path("/tmp/gqaconvert-bench"))
    parser.add_argument("--cold", action="store_true", help="read the source from the disk, as what exceeds memory is")
    arguments = parser.parse_args()
    source = arguments.dir / "source"
    if not source.exists():
        big_llama_checkpoint(source, arguments.gib, arguments.shards)
    convert = [
        sys.executable,
        "-m",
        "gqaconvert",
        "convert",
        str(source),
        "",
        "--kv-heads",
        str(arguments.kv_heads),
        "-q",
    ]
    durable = ["sh", "-c", 'cp -r "$0" "$1" && sync', str(source), ""]
    # cp leaves its data in the page cache; a conversion is on the disk when it ends. So both rivals are shown.
    rivals = {"cp -r": ["cp", "-r", str(source), ""], "cp -r && sync": durable, "gqaconvert convert": convert}
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    memory: dict[str, list[int]] = {name: [] for name in rivals}
    for run in range(arguments.runs + 1):
        for name in list(rivals)[:: -1 if run % 2 else 1]:
            command = rivals[name]
            target = arguments.dir / "target"
            shutil.rmtree(target, ignore_errors=True)
            os.sync()
            if arguments.cold:
                evict(source.iterdir())
            cost = timed([part or str(target) for part in command])
            if run:  # the first round only warms the page cache
                seconds[name].append(cost.wall)
                memory[name].append(cost.memory)
    state = "read from the disk" if arguments.cold else "in the page cache"
    table = Table(
        title=f"{arguments.gib:g} GiB in {arguments.shards} shards {state}, {arguments.runs} interleaved runs"
    )
    for column in ("", "median s", "min s", "max s", "peak RSS MiB"):
        table.add_column(column, justify="right")
    for name in rivals:
        times = seconds[name]
        figures = (statistics.median(times), min(times), max(times), max(memory[name]) / 2**20)
        table.add_row(name, *(f"{figure:.2f}" for figure in figures))
    Console().print(table)
    copy, durable_copy, ours = (statistics.median(seconds[name]) for name in rivals)
    print(f"1.15 x cp + 2 s = {1.15 * copy + 2:.2f} s, 1.15 x (cp and sync) + 2 s = {1.15 * durable_copy + 2:.2f} s")
    print(f"needed {ours:.2f} s: {ours / copy:.2f} x cp, {ours / durable_copy:.2f} x (cp and sync)")


if __name__ == "__main__":
    main()
