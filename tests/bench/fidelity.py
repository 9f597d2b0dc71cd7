"""How much of a model is left after a merge, without any uptraining: held-out perplexity by method.

    python -m tests.bench.fidelity example            # the example model, 8 -> 4, 2 and 1 KV heads; about 10 minutes
    python -m tests.bench.fidelity smollm2            # SmolLM2-135M, 3 -> 1; up to 20 minutes a refined row

Protocol. Example model: windows of 256 tokens, the first 60 windows of examples/heldout.txt (speeches that neither the
model nor the calibration saw), calibration on at most 40,000 tokens of examples/calibration.txt (speeches of the
model's training set). SmolLM2: calibration and evaluation on the topics of Python's pydoc (every fourth topic is held
out, paragraphs that occur twice are dropped), windows of 512, 16 windows. All in float32, from the stored files.
"""

import argparse
import json
import pydoc_data.topics
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.support.perplexity import perplexity
from tests.support.smollm2 import smollm2_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
METHODS: Mapping[str, list[str]] = {
    "mean": ["--method", "mean"],
    "first": ["--method", "first"],
    "align, weights only": ["--method", "align"],
    "align, calibrated": ["--method", "align", "--calibrate", "TEXT"],
    "subspace, weights only": ["--method", "subspace"],
    "subspace, calibrated": ["--method", "subspace", "--calibrate", "TEXT"],
    "subspace, similar heads": ["--method", "subspace", "--calibrate", "TEXT", "--grouping", "similar"],
    "subspace, refined (24 steps)": ["--method", "subspace", "--calibrate", "TEXT", "--refine", "24"],
    "subspace, refined (24), joint (24)": [
        "--method", "subspace", "--calibrate", "TEXT", "--refine", "24", "--joint", "24",
    ],
    "subspace, refined (auto)": ["--method", "subspace", "--calibrate", "TEXT", "--refine", "auto"],
    "subspace, refined (auto), joint (60)": [
        "--method", "subspace", "--calibrate", "TEXT", "--refine", "auto", "--joint", "60",
    ],
    "subspace, similar, refined (auto)": [
        "--method", "subspace", "--calibrate", "TEXT", "--grouping", "similar", "--refine", "auto",
    ],
}  # fmt: skip


def pydoc_texts(folder: Path) -> tuple[Path, Path]:
    """(calibration, held out): Python's documentation topics, split by topic, without paragraphs that repeat."""
    topics = dict(sorted(pydoc_data.topics.topics.items()))
    seen: dict[str, int] = {}
    for text in topics.values():
        for paragraph in set(text.split("\n\n")):
            seen[paragraph] = seen.get(paragraph, 0) + 1
    parts: tuple[list[str], list[str]] = ([], [])
    for number, text in enumerate(topics.values()):
        parts[number % 4 == 0].append("\n\n".join(part for part in text.split("\n\n") if seen[part] == 1))
    paths = folder / "calibration.txt", folder / "heldout.txt"
    for path, part in zip(paths, parts, strict=True):
        path.write_text("\n\n".join(part), "utf-8")
    return paths


def main() -> None:
    """Convert by every method, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["example", "smollm2"])
    parser.add_argument("--dir", type=Path, default=Path("/tmp/gqaconvert-fidelity"))
    parser.add_argument("--only", help="methods whose name contains this")
    parser.add_argument("--tokens", type=int, default=40_000, help="calibration tokens")
    arguments = parser.parse_args()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    counts: tuple[int, ...]
    if arguments.model == "example":
        source, counts, window, windows = EXAMPLES / "tiny-llama", (4, 2, 1), 256, 60
        calibration, held_out = EXAMPLES / "calibration.txt", EXAMPLES / "heldout.txt"
    else:
        source, counts, window, windows = smollm2_checkpoint(), (1,), 512, 16
        calibration, held_out = pydoc_texts(arguments.dir)
    text = held_out.read_text("utf-8")
    original = perplexity(source, text, window=window, windows=windows)
    table = Table(title=f"{source.name}: perplexity {original:.2f} on {windows} x {window} held-out tokens")
    for column in ("method", "KV heads", "perplexity", "x original", "CPU s"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, options in METHODS.items():
        if arguments.only and arguments.only not in name:
            continue
        for count in counts:
            target = arguments.dir / "target"
            command = [sys.executable, "-m", "gqaconvert", "convert", str(source), str(target), "--overwrite", "--json"]
            command += ["--kv-heads", str(count), "--restart", "--calibration-tokens", str(arguments.tokens)]
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            started = time.monotonic()
            done = subprocess.run(
                [*command, *(str(calibration) if option == "TEXT" else option for option in options)],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            assert json.loads(done.stdout)["num_key_value_heads"]["target"] == count
            now = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
            found = perplexity(target, text, window=window, windows=windows)
            print(f"{name}, {count}: {found:.2f}, {time.monotonic() - started:.0f} s of wall time", flush=True)
            table.add_row(name, str(count), f"{found:,.2f}", f"{found / original:,.3f}", f"{seconds:.0f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
