"""Options that several commands share."""

from typing import Annotated

import typer

from gqaconvert.units import parse_size

Source = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint's folder, or a Hub id.", show_default=False)]
Revision = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit of a Hub id.", show_default=False)
]
Offline = Annotated[bool, typer.Option("--offline", help="Use only what the Hub's cache holds.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON (schemas: see the README).")]
FamilyName = Annotated[
    str | None,
    typer.Option("--family", help="Vouch for the layout of an unknown model_type.", show_default=False),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


def size(text: str) -> int:
    """Parser for size options."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
