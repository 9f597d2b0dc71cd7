"""The picture of a run: loss, learning rate and gradient norm by step, from its metrics.jsonl (extra ``plot``)."""

import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gqaconvert.checkpoint.writer import write_file
from gqaconvert.errors import InputError, MissingExtraError, StorageError

_TRAIN, _EVAL, _LR, _NORM = "#2b6cb0", "#dd6b20", "#38a169", "#805ad5"
_SMOOTHED_FROM = 40
"""From so many points on, a running mean is drawn over the single losses."""


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file, in order; a last line that a kill cut off is left out.

    Raises:
        StorageError: it cannot be read.
        InputError: a line in its midst is no JSON object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            records.append(record)
        elif number < len(lines):
            raise InputError(f"{path}, line {number}: no JSON object")
    return records


def write_curve(metrics: Path, target: Path, *, title: str, source_loss: float | None = None) -> None:
    """Draw a run as PNG. The same metrics give the same bytes, for one version of matplotlib.

    Args:
        metrics: a metrics.jsonl; of its records ``step`` and, where they have them, ``loss``, ``eval_loss``, ``lr``,
            ``grad_norm`` (all finite) and ``spike`` are used.
        target: the PNG.
        title: above the picture.
        source_loss: evaluation loss of the unconverted model, drawn as a line to compare with.

    Raises:
        InputError: no losses.
        MissingExtraError: matplotlib is not installed.
        StorageError: reading or writing fails.
    """
    records = read_metrics(metrics)
    try:
        picture = draw_curve(records, title=title, source_loss=source_loss)
        write_file(target, picture)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror}") from error


def draw_curve(records: Sequence[Mapping[str, Any]], *, title: str, source_loss: float | None = None) -> bytes:
    """The same as bytes of a PNG.

    Raises:
        InputError: no losses.
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise MissingExtraError("matplotlib", "plot") from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    losses = list(_points(records, "loss"))
    if not losses:
        raise InputError("the metrics hold no losses to draw")
    with matplotlib.rc_context({"font.size": 10}):
        figure = Figure(figsize=(9, 5.6), layout="constrained")
        FigureCanvasAgg(figure)
        top, bottom = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1]})
        _draw_losses(top, records, losses, source_loss)
        _draw_rates(bottom, records)
        figure.suptitle(title)
        target = io.BytesIO()
        figure.savefig(target, format="png", dpi=150, metadata={"Software": None})
    return target.getvalue()


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last ``window`` values, of fewer at the beginning."""
    sums, total = [0.0], 0.0
    for value in values:
        total += value
        sums.append(total)
    return [(sums[end] - sums[max(0, end - window)]) / min(end, window) for end in range(1, len(sums))]


def _points(records: Sequence[Mapping[str, Any]], name: str) -> Iterator[tuple[int, float]]:
    for record in records:
        value = record.get(name)
        if isinstance(value, (int, float)) and math.isfinite(value):
            yield record["step"], value


def _draw_losses(
    axis: Any,  # noqa: ANN401
    records: Sequence[Mapping[str, Any]],
    losses: list[tuple[int, float]],
    source_loss: float | None,
) -> None:
    steps, values = zip(*losses, strict=True)
    window = len(values) // 20
    smoothed = len(values) >= _SMOOTHED_FROM
    style = {"alpha": 0.35} if smoothed else {"marker": "o", "markersize": 3}
    axis.plot(steps, values, color=_TRAIN, linewidth=1, label="training, each step", **style)
    if smoothed:
        axis.plot(steps, running_mean(values, window), color=_TRAIN, label=f"training, mean of the last {window}")
    evaluations = list(_points(records, "eval_loss"))
    if evaluations:
        axis.plot(*zip(*evaluations, strict=True), "o-", color=_EVAL, markersize=4, label="held out")
        last = evaluations[-1]
        axis.annotate(
            f"{last[1]:.3f}", last, textcoords="offset points", xytext=(0, 7), ha="right", color=_EVAL, fontsize=9
        )
    spikes = [(record["step"], record["loss"]) for record in records if record.get("spike")]
    spikes = [(step, loss) for step, loss in spikes if isinstance(loss, (int, float)) and math.isfinite(loss)]
    if spikes:
        axis.plot(*zip(*spikes, strict=True), "v", color="#c53030", label="spike")
    if source_loss is not None:
        axis.axhline(source_loss, color="#4a5568", linestyle="--", linewidth=1, label="source model, held out")
    axis.set_ylabel("loss, nats a token")
    axis.grid(alpha=0.3)
    axis.legend(loc="upper right")


def _draw_rates(axis: Any, records: Sequence[Mapping[str, Any]]) -> None:  # noqa: ANN401
    axis.set_xlabel("step")
    axis.grid(alpha=0.3)
    rates, norms = list(_points(records, "lr")), list(_points(records, "grad_norm"))
    if rates:
        axis.plot(*zip(*rates, strict=True), color=_LR)
        axis.set_ylim(bottom=0)
        axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axis.set_ylabel("learning rate", color=_LR)
    if norms:
        other = axis.twinx()
        other.plot(*zip(*norms, strict=True), color=_NORM, linewidth=0.8, alpha=0.8)
        other.set_ylim(bottom=0)
        other.set_ylabel("gradient norm", color=_NORM)
