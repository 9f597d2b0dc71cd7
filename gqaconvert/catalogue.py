"""What is known of every family, for `gqaconvert families` and the README's table. No torch."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from itertools import groupby
from typing import Any, Literal

from gqaconvert.errors import InputError
from gqaconvert.families import Family, Part, all_families
from gqaconvert.families.builtin import FAMILIES, REFUSED_TYPES
from gqaconvert.families.family import Form
from gqaconvert.merge import POOLING, SITE_METHODS

SCHEMA = "gqaconvert.families/1"
TRANSFORMERS = "5.25"
"""The version of transformers that the built-in families are tested with."""

Kind = Literal["stock", "stock or shipped code", "shipped code", "publisher's code", "expanded only", "refused"]
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
"""Around the table in the README."""


@dataclass(frozen=True)
class FamilyFacts:
    """One family.

    Attributes:
        name: as ``--family`` takes it.
        model_types: config.json's ``model_type`` values.
        when: config values that tell families with one model_type apart.
        projections: names of the attention's projections.
        layout: how heads follow each other in them.
        position: of tokens.
        loads_in: what loads an output.
        kv_heads: the counts that can be written, in words.
        methods: merge methods that apply.
        limits: what subspace and align have to leave, in words.
        cross_attention: whether a second attention module of each layer is converted too.
        tested_with: version of transformers, None where only the published layout is tested.
        reason: why it is refused, or only written expanded.
        caution: what its user should hear.
    """

    name: str
    model_types: tuple[str, ...]
    when: dict[str, Any]
    projections: tuple[str, ...]
    layout: str
    position: str
    loads_in: Kind
    kv_heads: str
    methods: tuple[str, ...]
    limits: tuple[str, ...]
    cross_attention: bool
    tested_with: str | None
    reason: str | None
    caution: str | None


def catalogue() -> tuple[FamilyFacts, ...]:
    """Every family, plug-ins included, in the order of their declaration."""
    return tuple(_facts(family) for family in all_families())


def facts_of(name: str) -> tuple[FamilyFacts, ...]:
    """The families with this name or model_type.

    Raises:
        InputError: there is none; the closest names, or the reason of a refusal, are in the message.
    """
    every = catalogue()
    if found := tuple(facts for facts in every if name == facts.name or name in facts.model_types):
        return found
    if name in REFUSED_TYPES:
        raise InputError(f"{name} is refused: {REFUSED_TYPES[name]}")
    known = sorted({each for facts in every for each in (facts.name, *facts.model_types)})
    close = get_close_matches(name, known, n=3)
    raise InputError(f"no family {name!r}", hint=f"closest: {', '.join(close)}" if close else "gqaconvert families")


def document() -> dict[str, Any]:
    """The documented JSON form."""
    refused = [{"model_type": kind, "reason": reason} for kind, reason in REFUSED_TYPES.items()]
    return {"schema": SCHEMA, "families": [asdict(facts) for facts in catalogue()], "refused": refused}


def _facts(family: Family) -> FamilyFacts:
    projections = (Part.QUERY, Part.QUERY_GATED, Part.KEY, Part.VALUE, Part.QKV, Part.OUTPUT)
    return FamilyFacts(
        name=family.name,
        model_types=family.model_types,
        when=dict(family.when),
        projections=tuple(name for name, part in family.parts.items() if part in projections),
        layout=family.layout.value + (", (in, out)" if family.conv1d else ""),
        position=family.position.value,
        loads_in=_kind(family),
        kv_heads="none" if family.refusal else _counts(family.forms),
        methods=_methods(family),
        limits=_limits(family),
        cross_attention=family.cross_attention is not None,
        tested_with=TRANSFORMERS if family in FAMILIES and not family.remote else None,
        reason=family.refusal or family.wasteful,
        caution=family.caution,
    )


def _kind(family: Family) -> Kind:
    if family.refusal:
        return "refused"
    if not family.forms:
        return "expanded only"
    if family.remote:
        return "publisher's code"
    shipped = {form.shipped for form in family.forms}
    return "stock or shipped code" if len(shipped) > 1 else "shipped code" if shipped == {True} else "stock"


def _counts(forms: Iterable[Form]) -> str:
    """E.g. "any divisor"; counts that need something of the config are said to."""
    always = frozenset().union(*(form.counts for form in forms if not form.requires))
    needing = {
        count: f"{count} where {' and '.join(f'{key} is {str(value).lower()}' for key, value in form.requires.items())}"
        for form in forms
        if form.requires
        for count in form.counts - always
    }
    names = {"one": "1", "some": "between", "all": "all"}
    if always == {"one", "some", "all"}:
        return "any divisor"
    if always == {"one", "some"}:
        return "any smaller divisor"
    words = [names[count] for count in ("one", "some", "all") if count in always]
    words += [text.replace("some", "others", 1) for text in needing.values()]
    return ", ".join(words) or "none (--expanded)"


def _methods(family: Family) -> tuple[str, ...]:
    if family.refusal:
        return ()
    gated = Part.QUERY_GATED in family.parts.values()
    return tuple(POOLING) if gated else (*POOLING, *SITE_METHODS)


def _limits(family: Family) -> tuple[str, ...]:
    parts = set(family.parts.values())
    limits = []
    if Part.QUERY_GATED in parts:
        limits.append("no subspace or align: the query projection also makes gates")
    if parts & {Part.KEY_NORM, Part.KEY_NORM_LIST}:
        limits.append("K is pooled where each head has its own norm")
    if Part.KEY_NORM_SHARED in parts:
        limits.append("K keeps its directions where a norm follows it")
    if "attn_sub_norm" in family.parts:
        limits.append("V is pooled")
    return tuple(limits)


def markdown() -> str:
    """The README's table: families that do not differ in it share a row."""
    return "\n".join(_rows(catalogue())) + "\n"


def _rows(families: tuple[FamilyFacts, ...]) -> Iterator[str]:
    yield "| `model_type` | layout | KV heads that can be written | loads in | subspace, align |"
    yield "|---|---|---|---|---|"

    def row(facts: FamilyFacts) -> tuple[str, ...]:
        limits = "; ".join(facts.limits) or ("freely" if facts.methods else "no")
        loads = facts.loads_in if facts.reason is None or facts.loads_in != "refused" else f"refused: {facts.reason}"
        return facts.layout, facts.kv_heads, loads, limits.removeprefix("no subspace or align: ")

    ordered = sorted(families, key=lambda facts: (_ORDER.index(facts.loads_in), row(facts)))
    for cells, members in groupby(ordered, key=row):
        names = ", ".join(_name(facts) for facts in members)
        yield "| " + " | ".join((names, *cells)) + " |"


_ORDER: tuple[Kind, ...] = (
    "stock", "stock or shipped code", "shipped code", "publisher's code", "expanded only", "refused",
)  # fmt: skip


def _name(facts: FamilyFacts) -> str:
    told = ", ".join(f"{key}: {str(value).lower()}" for key, value in facts.when.items())
    types = ", ".join(facts.model_types)
    return f"{types} ({told})" if told else types


def write_table(readme: str) -> str:
    """A README with its table brought up to date, between the markers."""
    head, rest = readme.split(BEGIN)
    return f"{head}{BEGIN}\n{markdown()}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    import sys
    from pathlib import Path

    path = Path(sys.argv[1])
    path.write_text(write_table(path.read_text()))
