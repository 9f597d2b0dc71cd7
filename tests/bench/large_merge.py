"""A 7B-shaped subspace merge from weights alone: time and peak memory of the whole command.

    python -m tests.bench.large_merge --dir /path/with/30/GiB

Llama-2-7B's shapes (32 layers, hidden size 4096, 32 heads of 128, bfloat16, random values) to 8 KV heads. The peak is
the child's own maximum resident set (wait4).
"""

import argparse
import shutil
import sys
from pathlib import Path

from tests.bench.processes import timed
from tests.support.checkpoints import big_llama_checkpoint


def main() -> None:
    """Generate, convert, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=12.55)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--method", default="subspace")
    parser.add_argument("--dir", type=Path, default=Path("/tmp/gqaconvert-large"))
    arguments = parser.parse_args()
    source, target = arguments.dir / "source", arguments.dir / "target"
    if not source.exists():
        big_llama_checkpoint(source, arguments.gib, 6)
    shutil.rmtree(target, ignore_errors=True)
    command = [sys.executable, "-m", "gqaconvert", "convert", str(source), str(target), "--restart"]
    command += ["--kv-heads", str(arguments.kv_heads), "--method", arguments.method, "--quiet"]
    cost = timed(command)
    print(
        f"{arguments.gib:g} GiB, {arguments.method} to {arguments.kv_heads} KV heads: {cost.wall:.0f} s, "
        f"{cost.processor:.0f} CPU s, peak RSS {cost.memory / 2**30:.2f} GiB"
    )


if __name__ == "__main__":
    main()
