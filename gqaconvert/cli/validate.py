"""``gqaconvert validate``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gqaconvert.cli.options import FamilyName, Json, Offline, Quiet, Revision
from gqaconvert.cli.output import byte_progress, new_console, note, print_json, safe

if TYPE_CHECKING:
    from gqaconvert.validation.types import ValidationReport


def validate_command(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="What was converted; or DST alone, if it is gone.", show_default=False)
    ],
    destination: Annotated[str | None, typer.Argument(metavar="DST", help="The result.", show_default=False)] = None,
    level: Annotated[
        str | None,
        typer.Option("--level", help="files, logits or quality.", show_default="the last that is installed"),
    ] = None,
    atol: Annotated[float, typer.Option("--atol", min=0, help="Absolute tolerance of logits.")] = 1e-5,
    rtol: Annotated[float, typer.Option("--rtol", min=0, help="Tolerance relative to the largest logit.")] = 1e-4,
    text: Annotated[
        str | None, typer.Option("--text", metavar="FILE", help=".txt or .jsonl.", show_default="a packaged sample")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=2, help="Use at most so many tokens of it.")] = 8192,
    max_ppl_ratio: Annotated[
        float | None, typer.Option("--max-ppl-ratio", help="Fail above this perplexity ratio.", show_default=False)
    ] = None,
    max_kl: Annotated[
        float | None, typer.Option("--max-kl", help="Fail above this KL, in nats a token.", show_default=False)
    ] = None,
    min_top1: Annotated[
        float | None, typer.Option("--min-top1", help="Fail below this top-1 agreement.", show_default=False)
    ] = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.", show_default=False)
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page with plots.", show_default=False)
    ] = None,
    family: FamilyName = None,
    revision: Revision = None,
    offline: Offline = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check a conversion: are the files right, does the model compute what it should, how good is it still.

    Exits with 1 if a check failed. Without thresholds, quality is reported and never fails.
    """
    from gqaconvert.validation.documents import github_lines, junit_xml, report_html, step_summary, write_text
    from gqaconvert.validation.run import validate
    from gqaconvert.validation.types import Settings

    settings: Any = Settings(level, atol, rtol, text, max_tokens, max_ppl_ratio, max_kl, min_top1)  # type: ignore[arg-type]
    before, after = (None, source) if destination is None else (source, destination)
    with byte_progress("comparing", show=not (json or quiet)) as (set_total, advance):
        report = validate(
            before, after, settings, revision=revision, offline=offline, family=family,
            on_total=set_total, advance=advance,
        )  # fmt: skip
    if junit is not None:
        write_text(junit, junit_xml(report))
    if html is not None:
        write_text(html, report_html(report))
    for line in github_lines(report):
        note(line) if json else print(line)
    step_summary(report)
    if json:
        print_json(report.to_json())
    elif not quiet:
        _show(report)
    if not report.passed:
        raise typer.Exit(1)


_MARKS = {"passed": "[green]ok[/]", "failed": "[bold red]FAILED[/]", "skipped": "[yellow]skipped[/]"}


def _show(report: "ValidationReport") -> None:
    from rich import box
    from rich.table import Table

    console = new_console()
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("what was found", overflow="fold")
    for check in report.checks:
        lines = [check.message, *check.faults[:5]]
        if len(check.faults) > 5:
            lines.append(f"and {len(check.faults) - 5} more (--json lists them)")
        table.add_row(
            check.name, _MARKS[check.status], safe(lines[0]) + "".join(f"\n- {safe(line)}" for line in lines[1:])
        )
    console.print(table)
    if report.quality is not None:
        layers = Table(box=box.SIMPLE_HEAD)
        for column in ("layer", "drift of the residual stream", "attention entropy: source", "converted"):
            layers.add_column(column, justify="right")
        for layer in report.quality.layers:
            entropies = ("-" if value is None else f"{value:.3f}" for value in (layer.source_entropy, layer.entropy))
            layers.add_row(str(layer.layer), f"{layer.drift:.1%}", *entropies)
        console.print(layers)
    for text in report.notes:
        note(f"note: {text}")
    count = len(report.failed)
    note(f"{report.destination}: " + (f"{count} of {len(report.checks)} checks failed" if count else "no check failed"))
