"""Which policies are measured, and how much each may keep. No torch."""

from collections.abc import Iterator
from fractions import Fraction

from gqaconvert.errors import InputError
from gqaconvert.policies.scores import kind_named
from gqaconvert.policies.spec import KVPolicy, parse_amount


def parse_budgets(texts: tuple[str, ...]) -> tuple[tuple[str, Fraction], ...]:
    """(as written, part of the length).

    Raises:
        InputError: no part in (0, 1].
    """
    found = []
    for text in texts:
        amount = parse_amount(text)
        part = Fraction(amount)
        if not 0 < part <= 1:
            raise InputError(f"--budgets {text}: a budget is a part of the length, in (0, 1]", hint="1/8,1/4,1/2,1")
        found.append((text.strip(), part))
    return tuple(found)


def policies(texts: tuple[str, ...], budgets: tuple[str, ...], length: int) -> Iterator[tuple[str | None, KVPolicy]]:
    """(budget, policy) to measure at a length; the full cache first.

    A policy that is written with an amount has no budget. A budget is a number of entries (part x length, rounded up),
    as in the TOVA paper; for policies that skip layers by default a ratio of the tokens seen, as in the L2 paper.

    Raises:
        InputError: an unknown policy.
    """
    yield None, KVPolicy("full")
    parts = parse_budgets(budgets)
    for text in texts:
        kind = kind_named(text.strip().partition(":")[0])
        if kind.score is None:
            continue
        try:
            yield None, KVPolicy.parse(text)
            continue
        except InputError:
            KVPolicy.parse(text, amount=Fraction(1))  # it lacks the amount only, or this says what is wrong
        for name, part in parts:
            amount = part if kind.skip_layers else -(-length * part.numerator // part.denominator)
            yield name, KVPolicy.parse(text, amount=amount)
