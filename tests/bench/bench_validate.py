"""``validate --level files`` against reading both folders once: wall time and peak memory.

python -m tests.bench.bench_validate --gib 3 --shards 4 --runs 3 --dir /path/with/space
"""

import argparse
import statistics
import sys
from pathlib import Path

from tests.bench.convert_speed import timed
from tests.support.checkpoints import big_llama_checkpoint


def main() -> None:
    """Generate, run, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=3.0)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dir", type=Path, default=Path("/tmp/gqaconvert-bench-validate"))
    arguments = parser.parse_args()
    source, target = arguments.dir / "source", arguments.dir / "target"
    tool = [sys.executable, "-m", "gqaconvert"]
    if not source.exists():
        big_llama_checkpoint(source, arguments.gib, arguments.shards)
    if not target.exists():
        timed([*tool, "convert", str(source), str(target), "--kv-heads", str(arguments.kv_heads), "-q"])
    shards = [str(path) for folder in (source, target) for path in sorted(folder.glob("*.safetensors"))]
    rivals = {
        "read both": ["sh", "-c", 'cat "$@" | dd of=/dev/null bs=4M status=none', "sh", *shards],
        "validate": [*tool, "validate", str(source), str(target), "--level", "files", "-q"],
    }
    seconds: dict[str, list[float]] = {name: [] for name in rivals}
    peak = 0
    for run in range(arguments.runs + 1):
        for name, command in rivals.items():
            elapsed, memory = timed(command)
            peak = max(peak, memory) if name == "validate" else peak
            if run:  # the first round only warms the page cache
                seconds[name].append(elapsed)
    read, ours = (statistics.median(seconds[name]) for name in rivals)
    print(f"read both {read:.2f} s, validate {ours:.2f} s, ratio {ours / read:.2f}, peak {peak / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
