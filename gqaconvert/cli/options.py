"""Options that several commands share."""

import re
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


_COUNT = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def count(text: str) -> int:
    """Parser for numbers of tokens: 500k, 2B, 1.5T."""
    return int(_scaled(text, _COUNT, "a number: write 500k, 100M, 2B or 1.5T"))


def duration(text: str) -> float:
    """Parser for times, in seconds: 90m, 8h."""
    return _scaled(text, _SECONDS, "a time: write 90m, 8h or 2d")


def _scaled(text: str, units: dict[str, int], what: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]?)", text.strip().lower())
    if match is None or match[2] not in units or float(match[1]) <= 0:
        raise typer.BadParameter(f"{text!r} is not {what}")
    return float(match[1]) * units[match[2]]
