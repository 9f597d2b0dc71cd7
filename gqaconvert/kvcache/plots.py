"""Charts of an estimate: PNG or SVG by matplotlib (extra ``plot``), or one HTML file that needs nothing else."""

import csv
import io
from html import escape
from pathlib import Path
from typing import Any

from gqaconvert.errors import InputError, MissingExtraError
from gqaconvert.kvcache.estimate import Estimate, Row
from gqaconvert.units import GIB, KIB, MIB, format_size

SUFFIXES = (".png", ".svg", ".html")
_UNITS = ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_COLOURS = {
    "attention": "#2b6cb0", "window": "#63b3ed", "latent": "#805ad5", "cross": "#dd6b20", "state": "#38a169",
}  # fmt: skip


def check_plot_path(path: Path) -> None:
    """Refuse early what could only fail after the work.

    Raises:
        InputError: another suffix.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"--plot {path}: the name has to end in one of {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--plot {path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtraError("matplotlib", "plot") from None


def write_plot(path: Path, estimate: Estimate) -> None:
    """Write the chart. The same estimate gives the same bytes, for one version of matplotlib.

    Raises:
        InputError: the suffix is none of .png, .svg, .html.
        MissingExtraError: matplotlib is not installed.
    """
    check_plot_path(path)
    if path.suffix.lower() == ".html":
        path.write_text(_html(estimate), encoding="utf-8")
    else:
        path.write_bytes(_figure(estimate, path.suffix.lower()[1:]))


def chart_rows(estimate: Estimate) -> tuple[Row, ...]:
    """The rows that a chart compares: all KV-head counts at the longest context and the largest batch."""
    context = max(row.context for row in estimate.rows)
    batch = max(row.batch for row in estimate.rows)
    rows = (row for row in estimate.rows if (row.context, row.batch) == (context, batch))
    return tuple(sorted(rows, key=lambda row: row.num_key_value_heads or 0))


def chart_title(row: Row) -> str:
    """What a chart shows."""
    return f"{row.context:,} tokens, batch {row.batch}"


def _figure(estimate: Estimate, kind: str) -> bytes:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = chart_rows(estimate)
    timed = [row for row in rows if row.decode and row.decode.seconds is not None and row.num_key_value_heads]
    with matplotlib.rc_context({"svg.hashsalt": "gqaconvert", "svg.fonttype": "none", "font.size": 10}):
        figure = Figure(figsize=(10 if timed else 6, 4.2), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(1, 2 if timed else 1, squeeze=False)[0]
        _bars(axes[0], rows)
        if timed:
            assert estimate.gpu is not None
            counts = [row.num_key_value_heads or 0 for row in timed]
            longest = max(row.decode.seconds or 0 for row in timed if row.decode)
            scale, unit = (1e3, "ms") if longest >= 1e-3 else (1e6, "\N{MICRO SIGN}s")
            axes[1].plot(counts, [scale * (row.decode.seconds or 0) for row in timed if row.decode], "o-",
                         color=_COLOURS["attention"])  # fmt: skip
            axes[1].set_xscale("log", base=2)
            axes[1].set_xticks(counts, [str(count) for count in counts], minor=False)
            axes[1].set_ylim(bottom=0)
            axes[1].set_xlabel("KV heads")
            axes[1].set_ylabel(f"{unit} for one decoding step, at least")
            axes[1].set_title(f"bound on {estimate.gpu.name}, devices: {estimate.settings.tensor_parallel}")
            axes[1].grid(alpha=0.3)
        figure.suptitle(f"{Path(estimate.source).name}: KV cache, {chart_title(rows[0])}")
        target = io.BytesIO()
        # A date in the file would make equal charts differ.
        metadata = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(target, format=kind, dpi=150, metadata=metadata)
    return target.getvalue()


def _bars(axis: Any, rows: tuple[Row, ...]) -> None:  # noqa: ANN401
    labels = [str(row.num_key_value_heads or "none") for row in rows]
    largest = max(row.cache_bytes for row in rows)
    unit, name = next(((size, name) for size, name in _UNITS if largest >= size), _UNITS[-1])
    bottom = [0.0] * len(rows)
    for part, colour in _COLOURS.items():
        heights = [row.parts.get(part, 0) / unit for row in rows]
        if any(heights):
            axis.bar(labels, heights, bottom=bottom, color=colour, label=part)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for number, row in enumerate(rows):
        axis.annotate(format_size(row.cache_bytes), (number, bottom[number]), ha="center", va="bottom", fontsize=8)
    axis.margins(y=0.12)
    axis.set_xlabel("KV heads")
    axis.set_ylabel(f"{name}, all devices")
    axis.set_title("size of the cache")
    if sum(1 for part in _COLOURS if any(row.parts.get(part) for row in rows)) > 1:
        axis.legend()


_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#1a202c}"
    "svg{max-width:100%;height:auto}table{border-collapse:collapse;margin:1rem 0}"
    "th,td{padding:.25rem .8rem;text-align:right;border-bottom:1px solid #e2e8f0}th{background:#f7fafc}"
)


def _html(estimate: Estimate) -> str:
    drawing = _figure(estimate, "svg").decode()
    drawing = drawing[drawing.index("<svg") :]
    columns = ("KV heads", "context", "batch", "cache", "on each device", "prefill peak", "bytes read a step",
               "time a step, at least")  # fmt: skip
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(row)) + "</tr>" for row in estimate.rows
    )
    settings = estimate.settings
    facts = (
        f"{estimate.model.model_type}, {estimate.model.num_hidden_layers} layers ({estimate.model.pattern}); "
        f"keys {settings.key.name}, values {settings.value.name}; devices: {settings.tensor_parallel}; "
        f"as held by: {settings.runtime}" + (f"; policy {settings.policy}" if settings.policy else "")
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in estimate.notes)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>KV cache of {escape(estimate.source)}'
        f"</title><style>{_STYLE}</style></head><body><h1>KV cache of {escape(estimate.source)}</h1>"
        f"<p>{escape(facts)}</p>{drawing}<table><thead><tr>"
        + "".join(f"<th>{escape(column)}</th>" for column in columns)
        + f"</tr></thead><tbody>{body}</tbody></table><ul>{notes}</ul></body></html>\n"
    )


def _cells(row: Row) -> tuple[str, ...]:
    seconds = row.decode.seconds if row.decode else None
    return (
        str(row.num_key_value_heads or "none"), f"{row.context:,}", str(row.batch), format_size(row.cache_bytes),
        format_size(row.cache_bytes_per_device), format_size(row.prefill_peak_bytes),
        format_size(row.decode.bytes_read) if row.decode else "unknown",
        f"{1000 * seconds:.4g} ms" if seconds is not None else "unknown",
    )  # fmt: skip


def to_csv(estimate: Estimate) -> str:
    """One line a row, integer bytes; empty where something is not known."""
    target = io.StringIO()
    names = ("num_key_value_heads", "context", "batch", "cache_bytes", "cache_bytes_per_device", "prefill_peak_bytes")
    writer = csv.writer(target, lineterminator="\n")
    writer.writerow((*names, "effective_factor", "decode_bytes_read_per_device", "decode_seconds_bound"))
    for row in estimate.rows:
        decode = row.decode
        writer.writerow(
            (*(getattr(row, name) for name in names), row.effective_factor,
             decode.bytes_read if decode else None, decode.seconds if decode else None)
        )  # fmt: skip
    return target.getvalue()
