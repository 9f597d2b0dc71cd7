"""``gqaconvert inspect``."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gqaconvert.cli.options import FamilyName, Json, Offline, Quiet, Revision, Source
from gqaconvert.cli.output import byte_progress, new_console, print_json, safe

if TYPE_CHECKING:
    from rich.console import Console

    from gqaconvert.checkpoint.index import Problem
    from gqaconvert.inspection import Inspection


def inspect_command(
    source: Source,
    json: Json = False,
    check: Annotated[
        bool,
        typer.Option("--check", help="Read all weights and report NaN and infinity; exit 1 on any error."),
    ] = False,
    family: FamilyName = None,
    revision: Revision = None,
    offline: Offline = False,
    quiet: Quiet = False,
) -> None:
    """Say what a checkpoint is: heads, layout, sizes, problems, and the KV-head counts it can be converted to.

    Only headers and JSON are read (for a Hub id, only they travel), unless --check is given.
    """
    from gqaconvert.inspection import describe, inspect_checkpoint, read_checkpoint, with_problems

    if not check:
        inspection = inspect_checkpoint(source, revision=revision, offline=offline, family=family)
    else:
        from gqaconvert.checkpoint.source import fetch_source
        from gqaconvert.finite import find_non_finite

        folder = fetch_source(source, revision=revision, offline=offline)
        checkpoint = read_checkpoint(folder, family=family)
        with byte_progress("checking", show=not (json or quiet)) as (set_total, advance):
            set_total(checkpoint.index.total_size)
            found = find_non_finite(checkpoint.index, folder, advance)
        inspection = with_problems(describe(checkpoint), found)
    if json:
        print_json(inspection.to_json())
    elif not quiet:
        _show(inspection)
    if check and any(problem.severity == "error" for problem in inspection.problems):
        raise typer.Exit(1)


def _show(inspection: "Inspection") -> None:
    from rich import box
    from rich.table import Table

    from gqaconvert.units import format_size

    console = new_console()
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    for label, value in _facts(inspection):
        facts.add_row(label, safe(value))
    console.print(facts)
    if inspection.kv_heads:
        table = Table(box=box.SIMPLE_HEAD, title="KV heads", title_justify="left", title_style="bold")
        for column in ("KV heads", "queries/KV", "cache/token", "tensor parallel"):
            table.add_column(column, justify="left" if column == "tensor parallel" else "right")
        for option in inspection.kv_heads:
            sizes = " ".join(map(str, option.tensor_parallel))
            if option.tensor_parallel_replicated:
                sizes += f"  (with copies: {' '.join(map(str, option.tensor_parallel_replicated))})"
            table.add_row(
                f"{option.num_key_value_heads}{' (now)' if option.current else ''}",
                str(option.queries_per_kv), format_size(option.cache_bytes_per_token), sizes,
                style="bold" if option.current else None,
            )  # fmt: skip
        console.print(table)
    _show_verdict(inspection, console)


def _show_verdict(inspection: "Inspection", console: "Console") -> None:
    if inspection.convertible:
        console.print("[green]can be converted[/green]")
    else:
        console.print(f"[yellow]cannot be converted:[/yellow] {safe(inspection.reason or '')}")
    if inspection.caution:
        console.print(f"note: {safe(inspection.caution)}")
    for problem in inspection.problems:
        console.print(_problem_line(problem))


def _problem_line(problem: "Problem") -> str:
    colour = "red" if problem.severity == "error" else "yellow"
    return f"[{colour}]{problem.severity}[/{colour}] {safe(problem.subject)}: {safe(problem.message)}"


def _facts(inspection: "Inspection") -> list[tuple[str, str]]:
    from gqaconvert.units import format_size

    kind = inspection.model_type + (f" (family {inspection.family})" if inspection.family else " (no known family)")
    heads = "unknown"
    if inspection.num_attention_heads:
        heads = (
            f"{inspection.attention}: {inspection.num_attention_heads} query heads, "
            f"{inspection.num_key_value_heads} KV heads, head_dim {inspection.head_dim}"
        )
        if inspection.value_head_dim != inspection.head_dim:
            heads += f", value head_dim {inspection.value_head_dim}"
    elif inspection.attention != "unknown":
        heads = inspection.attention
    position = inspection.position or "unknown"
    if inspection.rotary_fraction not in (None, 1.0):
        position += f", {inspection.rotary_fraction:.0%} of each head"
    shards = inspection.shards
    facts = [
        ("checkpoint", inspection.source + (f" @ {inspection.revision}" if inspection.revision else "")),
        ("model type", kind),
        ("layers", str(inspection.num_hidden_layers or "unknown")),
        ("attention", heads),
        (
            "projections",
            f"{', '.join(inspection.projections) or 'unknown'} ({inspection.layout or 'unknown layout'})",
        ),
        ("biases", ", ".join(inspection.biases) or "none"),
        ("Q/K norms", ", ".join(inspection.norms) or "none"),
        ("positions", position),
        (
            "parameters",
            f"{inspection.parameters:,}{', tied embeddings' if inspection.tied_embeddings else ''}",
        ),
        ("types", ", ".join(f"{dtype} {format_size(size)}" for dtype, size in inspection.dtypes.items())),
        (
            "files",
            f"{len(shards)} shard{'s' if len(shards) != 1 else ''}, {format_size(sum(shards.values()))}",
        ),
    ]
    if inspection.sliding_window:
        facts.insert(8, ("window", f"{inspection.sliding_window:,} tokens (where layers use it)"))
    if inspection.provenance:
        facts.append(("made by", _origin(inspection.provenance)))
    return facts


def _origin(record: Mapping[str, Any]) -> str:
    tool, source, recipe = (
        value if isinstance(value := record.get(key), dict) else {} for key in ("tool", "source", "recipe")
    )
    how = "uptrained" if recipe.get("command") == "uptrain" else f"method {recipe.get('method')}"
    told = (
        f"{tool.get('name')} {tool.get('version')} from {source.get('id')} "
        f"({source.get('num_key_value_heads')} KV heads), {how}"
    )
    earlier = source.get("provenance")
    return f"{told}; that by {_origin(earlier)}" if isinstance(earlier, dict) else told
