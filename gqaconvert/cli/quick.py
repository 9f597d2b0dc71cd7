"""Parameters that cost no start-up time.

typer 0.29 builds a pydantic adapter for every parameter that is not a given flag, even for one that nobody gave. That
imports pydantic, which takes as long as all of ``inspect``. Nothing, and a text, need no adapter.
"""

from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

if TYPE_CHECKING:
    Base = TyperCommand
else:
    Base = object


class QuickParameters(Base):
    """Of a command or a group: takes texts, and what was not given, as they are; everything else goes typer's way."""

    def get_params(self, ctx: Any) -> list[Any]:  # noqa: ANN401
        """All parameters, also ``--help``."""
        parameters = super().get_params(ctx)
        for parameter in parameters:
            if "process_value" not in vars(parameter):
                parameter.process_value = _quick(parameter)  # type: ignore[method-assign]
        return parameters


class QuickCommand(QuickParameters, TyperCommand):
    """A command with quick parameters."""


def _quick(parameter: Any) -> Any:  # noqa: ANN401
    thorough = parameter.process_value
    descriptor = getattr(parameter, "type_descriptor", None)  # None: a typer that works in another way
    text = descriptor is not None and descriptor.annotation is str and descriptor.parameter_info.parser is None
    single = descriptor is not None and parameter.nargs == 1 and not parameter.multiple

    def process_value(context: Any, value: Any) -> Any:  # noqa: ANN401
        as_it_is = (value is None and not parameter.required) or (text and isinstance(value, str))
        if not (single and as_it_is):
            return thorough(context, value)
        return parameter.callback(context, parameter, value) if parameter.callback else value

    return process_value
