"""Model families as data, and how a checkpoint finds its own."""

import difflib
from collections.abc import Iterator
from functools import cache

from gqaconvert.errors import InputError, UnsupportedModelError
from gqaconvert.families.builtin import FAMILIES, REFUSED_TYPES
from gqaconvert.families.config import ModelConfig
from gqaconvert.families.family import KV_HEADS, Family, Form, Layout, Part, Position

__all__ = [
    "KV_HEADS",
    "Family",
    "Form",
    "Layout",
    "Part",
    "Position",
    "all_families",
    "family_of",
    "get_family",
]

ENTRY_POINTS = "gqaconvert.families"


@cache
def all_families() -> tuple[Family, ...]:
    """The built-in families, then those of installed plug-ins (entry points in the group ``gqaconvert.families``).

    Raises:
        InputError: a plug-in cannot be imported, or takes a built-in's name.
    """
    from importlib.metadata import entry_points  # the email package comes with it

    families = {family.name: family for family in FAMILIES}
    for point in entry_points(group=ENTRY_POINTS):
        try:
            family = point.load()
        except Exception as error:  # whatever a foreign module raises
            raise InputError(f"the family plug-in {point.name!r} ({point.value}) fails: {error!r}") from error
        if not isinstance(family, Family) or family.name in families:
            raise InputError(f"the family plug-in {point.name!r} ({point.value}) is no new Family")
        families[family.name] = family
    return tuple(families.values())


def _built_in_first() -> Iterator[Family]:
    """All families; plug-ins are asked for only by who goes on beyond the built-in ones."""
    yield from FAMILIES
    yield from all_families()[len(FAMILIES) :]


def get_family(name: str) -> Family:
    """The family with this name.

    Raises:
        InputError: there is none; the closest names are in the message.
    """
    for family in all_families():
        if family.name == name:
            return family
    raise InputError(f"no family {name!r}", hint=_closest(name))


def family_of(config: ModelConfig) -> Family:
    """The family that a config.json belongs to.

    Raises:
        UnsupportedModelError: unknown, or known and not described as data; the message says which and why.
    """
    model_type = config.model_type
    if not model_type:
        raise UnsupportedModelError("config.json has no model_type", hint="--family NAME says what it is")
    for family in _built_in_first():
        if model_type in family.model_types and config.matches(family.when, family.defaults):
            return family
    if model_type in REFUSED_TYPES:
        raise UnsupportedModelError(f"model_type {model_type!r}: {REFUSED_TYPES[model_type]}")
    raise UnsupportedModelError(
        f"model_type {model_type!r} is not known",
        hint=f"{_closest(model_type)}; if you know that its layout is the same as one of these, --family NAME says so",
    )


def _closest(name: str) -> str:
    names = {family.name for family in all_families()} | {kind for f in all_families() for kind in f.model_types}
    close = difflib.get_close_matches(name, sorted(names), n=3, cutoff=0.4)
    return f"closest: {', '.join(close)}" if close else f"known: {', '.join(sorted(names))}"
