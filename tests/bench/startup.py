"""Start-up: ``--help``, ``inspect``, and an index of 100,000 tensors, against ``import typer, rich.table``.

    python -m tests.bench.startup --runs 11

Runs alternate, medians are compared; the times are those of whole processes. Byte code is kept, as an installer leaves
it: without (PYTHONDONTWRITEBYTECODE) every start would compile this package again, but not its rival.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.support.checkpoints import llama_checkpoint, write_raw_safetensors

BASELINE = "import typer, rich.table"
TENSORS, SHARDS = 100_000, 160


def many_tensors(folder: Path) -> Path:
    """A mixture-of-experts-like llama checkpoint: 100,000 tiny tensors in 160 shards, attention in the first."""
    llama_checkpoint(folder, shards=1)
    names = [f"model.layers.0.mlp.experts.{number}.gate_proj.weight" for number in range(TENSORS)]
    weight_map: dict[str, str] = {}
    per_shard = TENSORS // SHARDS
    for shard in range(SHARDS):
        name = f"model-{shard + 2:05d}-of-{SHARDS + 1:05d}.safetensors"
        part = names[shard * per_shard : (shard + 1) * per_shard]
        header = {
            key: {"dtype": "BF16", "shape": [1], "data_offsets": [2 * n, 2 * n + 2]} for n, key in enumerate(part)
        }
        write_raw_safetensors(folder / name, header, bytes(2 * len(part)))
        weight_map |= dict.fromkeys(part, name)
    first = f"model-00001-of-{SHARDS + 1:05d}.safetensors"
    single = folder / "model.safetensors"
    length = int.from_bytes(single.read_bytes()[:8], "little")
    own = json.loads(single.read_bytes()[8 : 8 + length])
    weight_map |= dict.fromkeys((key for key in own if key != "__metadata__"), first)
    single.rename(folder / first)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=11)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        small = llama_checkpoint(Path(scratch) / "small")
        large = many_tensors(Path(scratch) / "large")
        gqaconvert = [sys.executable, "-m", "gqaconvert"]
        commands = {
            BASELINE: [sys.executable, "-c", BASELINE],
            "gqaconvert --help": [*gqaconvert, "--help"],
            "gqaconvert inspect": [*gqaconvert, "inspect", str(small)],
            "inspect, 100,000 tensors in 160 shards": [*gqaconvert, "inspect", str(large)],
        }
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for run in range(arguments.runs + 1):
            for name, command in commands.items():
                started = time.monotonic()
                subprocess.run(command, check=True, capture_output=True, env=environment)
                if run:
                    seconds[name].append(time.monotonic() - started)
    table = Table(title=f"{arguments.runs} interleaved runs")
    for column in ("", "median s", "min s", "x baseline"):
        table.add_column(column, justify="right")
    base = statistics.median(seconds[BASELINE])
    for name, times in seconds.items():
        median = statistics.median(times)
        table.add_row(name, f"{median:.3f}", f"{min(times):.3f}", f"{median / base:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
