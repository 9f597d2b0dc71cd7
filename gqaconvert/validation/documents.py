"""A report for machines and colleagues: JUnit XML, one self-contained page, GitHub's annotations and step summary."""

import html
import os
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from gqaconvert.errors import StorageError
from gqaconvert.report import line_chart
from gqaconvert.validation.types import Check, ValidationReport

_FAULTS = 50


def write_text(path: Path, text: str) -> None:
    """Write a document.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def _clean(text: str) -> str:
    """Without the control characters that XML forbids."""
    return "".join(char if char.isprintable() or char == "\n" else "\N{REPLACEMENT CHARACTER}" for char in text)


def junit_xml(report: ValidationReport) -> str:
    """JUnit XML: one test case a check."""
    cases = []
    for check in report.checks:
        head = f"  <testcase classname={quoteattr('gqaconvert.' + check.level)} name={quoteattr(check.name)}"
        head += f' time="{check.seconds:.3f}"'
        message = quoteattr(_clean(check.message))
        if check.status == "failed":
            body = escape(_clean("\n".join(check.faults)))
            cases.append(f"{head}>\n    <failure message={message}>{body}</failure>\n  </testcase>")
        elif check.status == "skipped":
            cases.append(f"{head}>\n    <skipped message={message}/>\n  </testcase>")
        else:
            cases.append(f"{head}/>")
    skips = sum(check.status == "skipped" for check in report.checks)
    counts = f'tests="{len(report.checks)}" failures="{len(report.failed)}" errors="0" skipped="{skips}"'
    name = quoteattr(_clean(f"gqaconvert validate {report.destination}"))
    lines = "\n".join(cases)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n<testsuite name={name} {counts}>\n{lines}\n</testsuite>\n'


def github_lines(report: ValidationReport) -> list[str]:
    """Annotations, where a GitHub runner reads them."""
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    return [
        f"::error title={_command(check.name, title=True)}::{_command(' | '.join((check.message, *check.faults[:3])))}"
        for check in report.failed
    ]


def _command(text: str, *, title: bool = False) -> str:
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return escaped.replace(":", "%3A").replace(",", "%2C") if title else escaped


def step_summary(report: ValidationReport) -> None:
    """Append a table to the step's summary, where a GitHub runner shows one.

    Raises:
        StorageError: it cannot be written.
    """
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    if not place or os.environ.get("GITHUB_ACTIONS") != "true":
        return
    rows = [f"| {check.name} | {check.status} | {_cell(check.message)} |" for check in report.checks]
    verdict = "passed" if report.passed else "FAILED"
    head = [
        f"### gqaconvert validate {_cell(report.destination)}: {verdict}",
        "",
        "| check | | found |",
        "|---|---|---|",
    ]
    try:
        with Path(place).open("a", encoding="utf-8") as file:
            file.write("\n".join([*head, *rows, "", *report.notes]) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write {place}: {error.strerror}") from error


def _cell(text: str) -> str:
    return html.escape(_clean(text).replace("\n", " ")).replace("|", "\\|")


def report_html(report: ValidationReport) -> str:
    """One page without anything from elsewhere: the verdict, what failed, plots, all checks."""
    skips = sum(check.status == "skipped" for check in report.checks)
    skips_told = f", {skips} skipped" if skips else ""
    verdict = f"no check failed{skips_told}" if report.passed else (
        f"{len(report.failed)} of {len(report.checks)} checks failed{skips_told}"
    )  # fmt: skip
    colour = "good" if report.passed else "bad"
    facts = [f"level {report.level}"]
    facts += [f"method {report.method}"] if report.method else []
    facts += [f"{report.num_key_value_heads} KV heads"] if report.num_key_value_heads else []
    title = html.escape(_clean(f"{report.source or 'an unknown source'} to {report.destination}"))
    parts = [
        f'<h1>gqaconvert validate</h1><p class="path">{title}</p><p>{html.escape(_clean(", ".join(facts)))}</p>'
        f'<p class="{colour}">{verdict}</p>'
    ]
    if report.failed:
        parts.append(_table("What failed", report.failed))
    parts += _plots(report)
    parts += [f"<p>{html.escape(text)}</p>" for text in report.notes]
    parts.append(_table("All checks", report.checks, faults=False))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>gqaconvert validate</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def _plots(report: ValidationReport) -> list[str]:
    parts = []
    if report.errors:
        layers = sorted({error.layer for error in report.errors})
        worst = [max(e.frobenius for e in report.errors if e.layer == layer) for layer in layers]
        parts.append(_lines("Error of the merged heads by layer, relative to the recomputation (0 is exact)",
                            layers, {"relative Frobenius": worst}))  # fmt: skip
    if report.quality is not None:
        quality = report.quality
        layers = [layer.layer for layer in quality.layers]
        parts.append(_figure(
            f"Perplexity on {quality.tokens:,} tokens in windows of {quality.window} (computed in float32)",
            bars({"source": quality.source_perplexity, "converted": quality.perplexity}),
        ))  # fmt: skip
        parts.append(
            f"<p>KL(source || converted) {quality.kl:.3f} nats a token, same next token {quality.top1:.1%}</p>"
        )
        parts.append(_lines("Drift of the residual stream after each layer, relative to the source's", layers,
                            {"drift": [layer.drift for layer in quality.layers]}))  # fmt: skip
        if all(layer.entropy is not None and layer.source_entropy is not None for layer in quality.layers):
            entropy = {  # in the order that gives each the colour of its bar above
                "converted": [layer.entropy or 0.0 for layer in quality.layers],
                "source": [layer.source_entropy or 0.0 for layer in quality.layers],
            }
            parts.append(_lines("Mean entropy of the attention, in nats", layers, entropy))
    return parts


_STYLE = (
    "body{font:15px/1.45 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse}td,th{padding:.3em .8em;border-bottom:1px solid #ddd;text-align:left;"
    "vertical-align:top}h1{font-size:1.4em}h2{font-size:1.1em;margin-top:1.6em}svg{max-width:100%;height:auto}"
    ".good{color:#1e8449;font-weight:bold}.bad{color:#c0392b;font-weight:bold}.skip{color:#9a7d0a;font-weight:bold}"
    "td:first-child,td:nth-child(2),td.time{white-space:nowrap}td,.path{overflow-wrap:anywhere}"
    "td.time{text-align:right;color:#777}ul{margin:.3em 0;padding-left:1.2em}"
)


def _figure(caption: str, picture: str) -> str:
    return f"<h2>{html.escape(caption)}</h2>{picture}"


def _lines(caption: str, layers: Sequence[int], series: Mapping[str, Sequence[float]]) -> str:
    """A chart of what is finite; the caption names the layers that are not."""
    finite = [place for place in range(len(layers)) if all(isfinite(values[place]) for values in series.values())]
    lost = [str(layers[place]) for place in range(len(layers)) if place not in finite]
    if lost:
        caption += f"; not finite in layer {', '.join(lost[:20])}"
    drawn = {name: [values[place] for place in finite] for name, values in series.items()}
    return _figure(caption, line_chart([layers[place] for place in finite], drawn) if finite else "")


def _table(caption: str, checks: Sequence[Check], *, faults: bool = True) -> str:
    rows = []
    for check in checks:
        shown = [f"<li>{html.escape(_clean(fault))}</li>" for fault in check.faults[:_FAULTS]]
        if len(check.faults) > _FAULTS:
            shown.append(f"<li>and {len(check.faults) - _FAULTS:,} more</li>")
        found = html.escape(_clean(check.message)) + (f"<ul>{''.join(shown)}</ul>" if shown and faults else "")
        colour = {"passed": "good", "failed": "bad", "skipped": "skip"}[check.status]
        rows.append(
            f'<tr><td>{html.escape(check.name)}</td><td class="{colour}">{check.status}</td><td>{found}</td>'
            f'<td class="time">{check.seconds:.2f} s</td></tr>'
        )
    head = "<tr><th>check</th><th></th><th>found</th><th></th></tr>"
    return f"<h2>{html.escape(caption)}</h2><table>{head}{''.join(rows)}</table>"


def bars(values: dict[str, float]) -> str:
    """Horizontal bars from zero, with their numbers."""
    top = max((value for value in values.values() if isfinite(value)), default=0.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {34 * len(values) + 8}" font-size="13" role="img">'
    ]
    for number, (name, value) in enumerate(values.items()):
        y, width = 34 * number + 6, 540 * min(value / top, 1) if isfinite(value) else 0
        parts.append(f'<text x="92" y="{y + 17}" text-anchor="end">{html.escape(name)}</text>')
        parts.append(
            f'<rect x="100" y="{y}" width="{width:.1f}" height="24" fill="{("#2471a3", "#c0392b")[number % 2]}"/>'
        )
        parts.append(f'<text x="{108 + width:.1f}" y="{y + 17}">{value:.4g}</text>')
    return "".join([*parts, "</svg>"])
