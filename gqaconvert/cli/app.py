"""The application: its commands, and the one place where errors become exit codes."""

import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gqaconvert import __version__
from gqaconvert.cli.convert import convert_command
from gqaconvert.cli.estimate import estimate_command
from gqaconvert.cli.evaluate import evaluate_command
from gqaconvert.cli.families import families_command
from gqaconvert.cli.inspect import inspect_command
from gqaconvert.cli.output import note
from gqaconvert.cli.quick import QuickCommand, QuickParameters
from gqaconvert.cli.uptrain import trainers_command, uptrain_command
from gqaconvert.cli.validate import validate_command
from gqaconvert.errors import GqaConvertError
from gqaconvert.uptrain import is_launched

INTERRUPTED = 130
ENVIRONMENT = 3


class ErrorGroup(QuickParameters, TyperGroup):
    """Prints deliberate errors as one line and a hint, and exits with their code; bugs keep their traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: ANN401
        """Let ``--debug`` stand anywhere, as people add it to the end of a failed command."""
        debug = "--debug" in args
        if debug:
            args = ["--debug", *(arg for arg in args if arg != "--debug")]
        with _exit_codes(debug=debug):  # --help and --version print while they are parsed
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        """Run the command."""
        with _exit_codes(debug=ctx.params.get("debug", False)):
            return super().invoke(ctx)


@contextmanager
def _exit_codes(*, debug: bool) -> Iterator[None]:
    """Known failures become a line, a hint and an exit code."""

    def show(message: str, hint: str | None = None) -> None:
        if debug:
            traceback.print_exc()
        note(f"error: {message}")
        if hint:
            note(f"hint: {hint}")

    try:
        yield
    except GqaConvertError as error:
        show(error.message, error.hint)
        raise typer.Exit(error.exit_code) from None
    except BrokenPipeError:
        # Whoever read us has enough (``| head``). What is still in the buffers goes nowhere, without a complaint.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        raise typer.Exit(ENVIRONMENT) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        show(f"{where}{error.strerror or error}")
        raise typer.Exit(ENVIRONMENT) from None
    except KeyboardInterrupt:
        show("interrupted", "the same command goes on from here (convert: with --resume)")
        raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=ErrorGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich help would import a Markdown parser at every start
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"gqaconvert {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Turn a multi-head-attention checkpoint into a grouped-query (GQA) or multi-query (MQA) one."""


app.command("inspect", cls=QuickCommand)(inspect_command)
app.command("convert", cls=QuickCommand)(convert_command)
app.command("families", cls=QuickCommand)(families_command)
app.command("estimate", cls=QuickCommand)(estimate_command)
app.command("validate", cls=QuickCommand)(validate_command)
app.command("evaluate", cls=QuickCommand)(evaluate_command)
app.command("uptrain", cls=QuickCommand)(uptrain_command)
app.command("trainers", cls=QuickCommand)(trainers_command)


def main() -> None:
    """Entry point of the ``gqaconvert`` script."""
    # The core needs no numpy, and torch says at its import that there is none.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    _open_missing_streams()
    try:
        app()
    except SystemExit as end:
        if not is_launched():
            raise
        from gqaconvert.uptrain.processes import leave

        leave(int(end.code or 0))


def _open_missing_streams() -> None:
    """Give a process started without a standard stream (``2>&-``, some daemons) one that leads nowhere.

    Python leaves ``None`` there, which nobody can print to, and the next file that is opened, a shard, would take the
    stream's descriptor and all that a C library prints there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # open takes the lowest free descriptor
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115
