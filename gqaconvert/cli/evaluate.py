"""``gqaconvert evaluate``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gqaconvert.cli.options import Json, Offline, Quiet, Revision
from gqaconvert.cli.output import count_progress, new_console, note, print_json, safe
from gqaconvert.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from gqaconvert.evaluation.types import Evaluation, PolicyRow


def evaluate_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, or a Hub id.", show_default=False)
    ],
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", metavar="MODEL", help="Another one beside it; repeatable.", show_default=False),
    ] = None,
    task: Annotated[
        str, typer.Option("--task", help="perplexity, passkey, needle, generate; alr, probe (by layer).")
    ] = "perplexity",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="SPEC",
            show_default="tova, window+sinks, window, l2",
            help="E.g. tova, l2:1/2:skip=0,1, window+sinks:128; repeatable. full is always there.",
        ),
    ] = None,
    budgets: Annotated[
        str, typer.Option("--budgets", help="Parts of the length, for policies without an amount.")
    ] = "1/8,1/4,1/2",
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", metavar="256,512", help="Tokens.", show_default="the context, at most 512"),
    ] = None,
    windows: Annotated[int, typer.Option("--windows", help="Windows of text; prompts at each of five depths.")] = 4,
    chunk: Annotated[
        int | None,
        typer.Option(
            "--chunk",
            help="Tokens read at once; 0: all. Only 1 is faithful for perplexity.",
            show_default="1 for perplexity, else all",
        ),
    ] = None,
    text: Annotated[
        str | None, typer.Option("--text", metavar="FILE", help="Text.", show_default="the packaged sample")
    ] = None,
    question: Annotated[
        str, typer.Option("--question", help="passkey, needle: later (after eviction), or known before it.")
    ] = "later",
    new_tokens: Annotated[int, typer.Option("--new-tokens", help="That --task generate writes.")] = 32,
    kv_heads: Annotated[int, typer.Option("--kv-heads", help="That --task probe leaves one layer.")] = 1,
    seed: Annotated[int, typer.Option("--seed", help="Of the hidden numbers.")] = 0,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Also draw a .png or .svg.", show_default=False)
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run a checkpoint's own code.")
    ] = False,
    revision: Revision = None,
    offline: Offline = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a model under KV-cache policies, and which of its layers bear what."""
    from gqaconvert.evaluation.plots import check_plot_path, write_plot
    from gqaconvert.evaluation.types import EvaluateOptions

    if plot is not None:
        check_plot_path(plot)
    kind: Any = task
    place: Any = question
    options = EvaluateOptions(
        task=kind, budgets=tuple(part for part in budgets.split(",") if part.strip()), lengths=_lengths(lengths),
        windows=windows, chunk=chunk, text=text, question=place, new_tokens=new_tokens, kv_heads=kv_heads, seed=seed,
        trust_remote_code=trust_remote_code, **({"policies": tuple(policy)} if policy else {}),
    )  # fmt: skip
    from gqaconvert.evaluation.run import evaluate

    with count_progress("tokens", show=not (json or quiet)) as (set_total, advance):
        found = evaluate(
            (model, *(compare or ())), options, revision=revision, offline=offline, on_total=set_total,
            advance=advance,
        )  # fmt: skip
    if plot is not None:
        write_plot(plot, found)
    if json:
        print_json(found.to_json())
    elif not quiet:
        _show(found)


def _lengths(text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise InputError(f"--lengths {text}: write numbers of tokens, e.g. 256,512") from None


def _show(found: "Evaluation") -> None:
    console = new_console()
    if found.norms:
        _show_norms(console, found)
    elif found.probes:
        _show_probes(console, found)
    else:
        _show_rows(console, found)
    for text in found.advice:
        console.print(safe(text))
    for text in found.notes:
        note(f"note: {text}")


def _table(*columns: str) -> Any:  # noqa: ANN401
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def _show_rows(console: "Console", found: "Evaluation") -> None:
    from gqaconvert.units import format_size

    value = {"perplexity": "perplexity", "generate": "same tokens"}.get(found.options.task, "accuracy")
    for model in found.models:
        for length in dict.fromkeys(row.length for row in found.rows if row.model == model):
            rows = [row for row in found.rows if (row.model, row.length) == (model, length)]
            read = f"{found.chunk} at once" if found.chunk else "all at once"
            console.print(f"[bold]{safe(model)}[/], {length:,} tokens, read {read}")
            table = _table("policy", value, "held", "of full", "peak", "tokens/s")
            full = rows[0]
            for row in rows:
                table.add_row(
                    safe(row.policy), _figure(row, found), format_size(row.held_bytes),
                    f"{row.held_bytes / max(1, full.held_bytes):.0%}", format_size(row.peak_bytes),
                    f"{row.tokens_per_second:,.0f}",
                )  # fmt: skip
            console.print(table)


def _figure(row: "PolicyRow", found: "Evaluation") -> str:
    if found.options.task == "perplexity":
        return f"{row.value:.2f}" if row.value < 1000 else f"{row.value:,.0f}"
    return f"{row.value:.0%}"


def _show_norms(console: "Console", found: "Evaluation") -> None:
    for model in found.models:
        console.print(
            f"[bold]{safe(model)}[/]: ALR relative to chance; 0: low norms get the attention, 1: they say nothing"
        )
        table = _table("layer", "mean", "by KV head")
        for norms in (norms for norms in found.norms if norms.model == model):
            heads = " ".join(f"{value:.2f}" for value in norms.heads[:12])
            table.add_row(str(norms.layer), f"{norms.mean:.2f}", heads + (" ..." if len(norms.heads) > 12 else ""))
        console.print(table)


def _show_probes(console: "Console", found: "Evaluation") -> None:
    for model in found.models:
        count = found.options.kv_heads
        title = f"loss {found.baseline[model]:.4f} nats a token; what one layer adds with {count} KV head"
        console.print(f"[bold]{safe(model)}[/]: {title}{'s' if count > 1 else ''}")
        table = _table("layer", "pooled", "constant attention")
        layers = sorted((p for p in found.probes if p.model == model), key=lambda probe: probe.pooled)
        for probe in layers:
            constant = "-" if probe.constant is None else f"{probe.constant:+.4f}"
            table.add_row(str(probe.layer), f"{probe.pooled:+.4f}", constant)
        console.print(table)
