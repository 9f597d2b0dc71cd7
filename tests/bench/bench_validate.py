"""``validate --level files`` against reading both folders once: wall time, processor time and peak memory.

    python -m tests.bench.bench_validate --gib 8 --shards 4 --runs 5 --dir /path/with/space

Rivals take turns, so that a noisy machine hurts all; medians are compared. ``cold``: the files were dropped from the
page cache before (posix_fadvise), so that the disk sets the pace. ``warm``: they are in it, and a plain reader is as
fast as memory. The reader takes 4 MiB at a time into memory that begins at a page, which is the fastest that one
thread does; ``cat | dd`` is what people time by hand.
"""

import argparse
import statistics
import sys
from pathlib import Path

from tests.bench.processes import Cost, evict, timed
from tests.support.checkpoints import big_llama_checkpoint

READER = """
import mmap, sys
buffer = mmap.mmap(-1, 4 * 2**20)
for name in sys.argv[1:]:
    with open(name, "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
"""


def main() -> None:
    """Generate, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--method", default="mean")
    parser.add_argument("--dir", type=Path, default=Path("/tmp/gqaconvert-bench-validate"))
    arguments = parser.parse_args()
    source, target = arguments.dir / "source", arguments.dir / f"target-{arguments.method}"
    tool = [sys.executable, "-m", "gqaconvert"]
    if not source.exists():
        big_llama_checkpoint(source, arguments.gib, arguments.shards)
    if not target.exists():
        options = ["--kv-heads", str(arguments.kv_heads), "--method", arguments.method, "-q"]
        timed([*tool, "convert", str(source), str(target), *options])
    shards = [str(path) for folder in (source, target) for path in sorted(folder.glob("*.safetensors"))]
    validate = [*tool, "validate", str(source), str(target), "--level", "files", "-q"]
    rivals = {
        ("read both", "cold"): [sys.executable, "-c", READER, *shards],
        ("validate", "cold"): validate,
        ("read both", "warm"): [sys.executable, "-c", READER, *shards],
        ("cat | dd", "warm"): ["sh", "-c", 'cat "$@" | dd of=/dev/null bs=4M status=none', "sh", *shards],
        ("validate", "warm"): validate,
    }
    runs: dict[tuple[str, str], list[Cost]] = {rival: [] for rival in rivals}
    for _ in range(arguments.runs):
        for rival, command in rivals.items():
            if rival[1] == "cold":
                evict(shards)
            runs[rival].append(timed(command))
    size = sum(Path(shard).stat().st_size for shard in shards) / 2**30
    print(f"{size:.2f} GiB in both folders together, {arguments.runs} rounds, medians")
    medians = {rival: statistics.median(run.wall for run in found) for rival, found in runs.items()}
    for (name, cache), found in runs.items():
        wall, processor = medians[name, cache], statistics.median(run.processor for run in found)
        peak = max(run.memory for run in found) / 2**20
        print(f"{name:10} {cache}  {wall:6.2f} s  processors {processor:6.2f} s  peak {peak:4.0f} MiB", end="")
        plain = medians["read both", cache]
        print(f"  {wall / plain:5.2f} x reading both, {cache}" if name == "validate" else "")
    print(f"validate warm: {medians['validate', 'warm'] / medians['cat | dd', 'warm']:.2f} x cat | dd")


if __name__ == "__main__":
    main()
