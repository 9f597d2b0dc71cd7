"""What a site merge did, layer by layer: a JSON document, or one self-contained HTML page with a picture."""

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gqaconvert.errors import InputError, StorageError

SCHEMA = "gqaconvert.merge-report/1"
_WIDTH, _HEIGHT, _MARGIN = 760, 260, 48
_COLOURS = ("#c0392b", "#2471a3", "#b9770e", "#1e8449")


def check_report_path(path: Path) -> None:
    """Refuse a report file that could not be written, before the work begins.

    Raises:
        InputError: neither .html nor .json, or in a folder that does not exist.
    """
    if path.suffix not in (".html", ".json"):
        raise InputError(f"--report {path}: the name must end with .html or .json")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--report {path}: no such folder: {path.absolute().parent}")


def report_document(title: str, sites: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The report as JSON.

    Args:
        title: what was converted to what.
        sites: the facts of every layer: ``layer``, ``key_explained`` and ``value_explained`` (a share of the energy
            for each group), ``key_rms`` and ``source_key_rms`` (root mean square of the weights of K), and where
            the merge was calibrated ``error_before``, ``error_after`` (squared, relative to the residual stream),
            ``steps``, ``source_attention_entropy`` and ``attention_entropy`` (nats, null where the stock class keeps
            its attention weights to itself).
    """
    return {"schema": SCHEMA, "title": title, "layers": [dict(site) for site in sites]}


def write_report(path: Path, title: str, sites: Sequence[Mapping[str, Any]]) -> None:
    """Write the report in the format that the file's name asks for.

    Raises:
        InputError: neither .html nor .json.
        StorageError: it cannot be written.
    """
    check_report_path(path)
    document = report_document(title, sites)
    text = json.dumps(document, indent=2) + "\n" if path.suffix == ".json" else report_html(document)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def report_html(document: Mapping[str, Any]) -> str:
    """The same as one page: where the loss comes from as a picture, then all numbers."""
    layers = document["layers"]
    numbers = [site["layer"] for site in layers]
    lost = {
        "K lost": [1 - _mean(site["key_explained"]) for site in layers],
        "V lost": [1 - _mean(site["value_explained"]) for site in layers],
    }
    pictures = [("Share of the heads' energy that one shared head cannot hold", line_chart(numbers, lost))]
    calibrated = all("error_after" in site for site in layers)
    if calibrated:
        errors = {
            "after the merge": [site["error_before"] for site in layers],
            "after refinement": [site["error_after"] for site in layers],
        }
        pictures.append(
            ("Error of the residual stream after each attention, held-out text", line_chart(numbers, errors))
        )
        entropies = {
            "source": [site["source_attention_entropy"] for site in layers],
            "merged": [site["attention_entropy"] for site in layers],
        }
        if None not in entropies["source"] + entropies["merged"]:
            pictures.append(("Entropy of the attention weights in nats, held-out text", line_chart(numbers, entropies)))
    columns = ["layer", "K kept, by group", "V kept, by group", "K rms, source", "K rms, merged"]
    columns += ["error before", "error after", "steps", "entropy, source", "entropy, merged"] if calibrated else []
    rows = []
    for site in layers:
        cells = [
            str(site["layer"]), _shares(site["key_explained"]), _shares(site["value_explained"]),
            f"{site['source_key_rms']:.4g}", f"{site['key_rms']:.4g}",
        ]  # fmt: skip
        if calibrated:
            cells += [f"{site['error_before']:.5f}", f"{site['error_after']:.5f}", str(site["steps"])]
            cells += [_nats(site["source_attention_entropy"]), _nats(site["attention_entropy"])]
        rows.append("".join(f"<td>{html.escape(cell)}</td>" for cell in cells))
    joint = layers[0] if layers and "joint_steps" in layers[0] else None
    summary = (
        f"<p>Then {joint['joint_steps']} steps on all layers together: KL(source || merged) on held-out text "
        f"{joint['divergence_before']:.4f} &rarr; {joint['divergence_after']:.4f} nats a token.</p>"
        if joint
        else ""
    )
    title = html.escape(str(document["title"]))
    figures = "".join(f"<h2>{html.escape(caption)}</h2>{picture}" for caption, picture in pictures)
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    top = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return (
        f'<!doctype html><html lang="en"><head>{top}</head><body><h1>{title}</h1>{summary}{figures}<h2>All numbers</h2>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></body></html>\n"
    )


_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.25em .8em;border-bottom:1px solid #ddd;text-align:right}"
    "h1{font-size:1.4em}h2{font-size:1.1em;margin-top:1.6em}svg{max-width:100%;height:auto}"
)


def line_chart(numbers: Sequence[int], series: Mapping[str, Sequence[float]]) -> str:
    """An SVG with one line for each series over the layers; the vertical axis begins at zero."""
    top = max((value for values in series.values() for value in values), default=0.0) or 1.0
    step = (_WIDTH - 2 * _MARGIN) / max(1, len(numbers) - 1)

    def point(index: int, value: float) -> tuple[float, float]:
        return _MARGIN + index * step, _HEIGHT - _MARGIN - value / top * (_HEIGHT - 2 * _MARGIN)

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="12" role="img">']
    for share in (0, 0.5, 1):
        _, y = point(0, share * top)
        parts.append(f'<line x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_MARGIN - 6}" y="{y + 4:.1f}" text-anchor="end">{share * top:.3g}</text>')
    every = max(1, len(numbers) // 16)
    for index, number in enumerate(numbers):
        x, y = point(index, 0)
        if index % every == 0:
            parts.append(f'<text x="{x:.1f}" y="{y + 18:.1f}" text-anchor="middle">{number}</text>')
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">layer</text>')
    for index, (name, values) in enumerate(series.items()):
        colour = _COLOURS[index % len(_COLOURS)]
        points = [point(place, value) for place, value in enumerate(values)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(
            f'<text x="{_MARGIN + 170 * index}" y="20" fill="{colour}">\N{BLACK CIRCLE} {html.escape(name)}</text>'
        )
    return "".join([*parts, "</svg>"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _nats(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.0%}" for value in values)
