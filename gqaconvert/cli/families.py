"""``gqaconvert families``."""

from typing import Annotated

import typer

from gqaconvert.cli.options import Json
from gqaconvert.cli.output import new_console, print_json, safe


def families_command(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One family or model_type, in full.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """List the architectures: what can be written for each, and what loads it."""
    from gqaconvert.catalogue import catalogue, document, facts_of

    if json:
        print_json(document())
        return
    from rich import box
    from rich.table import Table

    console = new_console()
    if name is not None:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column(overflow="fold")
        for facts in facts_of(name):
            for label, value in (
                ("family", facts.name),
                ("model_type", ", ".join(facts.model_types)),
                ("when", ", ".join(f"{key}: {str(wanted).lower()}" for key, wanted in facts.when.items())),
                ("projections", f"{', '.join(facts.projections)} ({facts.layout})"),
                ("positions", facts.position),
                ("cross attention", "converted too" if facts.cross_attention else ""),
                ("KV heads", facts.kv_heads),
                ("loads in", facts.loads_in),
                ("methods", ", ".join(facts.methods) or "none"),
                ("limits", "; ".join(facts.limits)),
                ("tested with", f"transformers {facts.tested_with}" if facts.tested_with else "the published layout"),
                ("reason", facts.reason or ""),
                ("caution", facts.caution or ""),
            ):
                if value:
                    grid.add_row(label, safe(value))
            grid.add_row("", "")
        console.print(grid)
        return
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("family", "layout", "KV heads", "loads in", "subspace, align"):
        table.add_column(column, overflow="fold", no_wrap=column == "family")
    for facts in catalogue():
        merged = "; ".join(facts.limits) or ("freely" if facts.methods else "no")
        table.add_row(*map(safe, (facts.name, facts.layout, facts.kv_heads, facts.loads_in, merged)))
    console.print(table)
    console.print(f"{len(document()['refused'])} more are refused by name: gqaconvert families --json lists them all")
