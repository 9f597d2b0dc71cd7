"""What a policy is told, how that is written, and how many entries a layer then holds. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from gqaconvert.errors import InputError
from gqaconvert.policies.scores import KINDS, kind_named

GRAMMAR = "KIND[:ENTRIES|:RATIO][:skip=LAYERS][:sinks=N][:recent=N|RATIO][:seed=N], e.g. tova:512 or l2:1/2:skip=0,1"
_AMOUNT = re.compile(r"(?P<count>\d{1,9})|(?P<ratio>\d{0,3}\.\d{1,6}|\d{1,9}/\d{1,9})")


@dataclass(frozen=True)
class KVPolicy:
    """One policy with its amount and options. Frozen, hashable; ``str`` and `parse` are inverse.

    Attributes:
        kind: a name in `gqaconvert.policies.scores.KINDS`.
        budget: entries that a layer keeps at most, None if a ratio is given.
        keep_ratio: part of the tokens seen so far that a layer keeps, rounded up; None if a budget is given.
        skip_layers: layers that keep everything.
        sinks: first tokens of each sequence that always stay.
        recent: newest tokens that always stay; a fraction is of the entries that are kept, rounded down.
        seed: of the policy that draws lots.

    Raises:
        InputError: on construction, for values that contradict each other.
    """

    kind: str
    budget: int | None = None
    keep_ratio: Fraction | None = None
    skip_layers: tuple[int, ...] = ()
    sinks: int = 0
    recent: int | Fraction = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if kind_named(self.kind).score is None:
            if (self.budget, self.keep_ratio, self.skip_layers, self.sinks, self.recent) != (None, None, (), 0, 0):
                raise InputError(f"policy {self.kind}: it keeps everything, so it takes no amount and no options")
            return
        if (self.budget is None) == (self.keep_ratio is None):
            raise InputError(f"policy {self.kind}: a number of entries or a ratio has to be given", hint=GRAMMAR)
        if self.keep_ratio is not None and not 0 < self.keep_ratio <= 1:
            raise InputError(f"policy {self}: the ratio is the part that is kept, in (0, 1]")
        if isinstance(self.recent, Fraction) and not 0 <= self.recent < 1:
            raise InputError(f"policy {self}: recent is a number of tokens, or a part of those kept in [0, 1)")
        if min(self.sinks, self.recent, self.seed, *self.skip_layers) < 0:
            raise InputError(f"policy {self}: counts, layers and seeds are not negative")
        if self.budget is not None and self.budget <= self.sinks + self.newest(self.budget):
            least = "at least one entry has to stay" if self.budget < 1 else "sinks and recent tokens leave no choice"
            raise InputError(f"policy {self}: {least}")

    @classmethod
    def parse(cls, text: str, amount: int | Fraction | None = None) -> KVPolicy:
        """Read ``tova:512``, ``l2:1/2:skip=0,1`` (``skip=`` alone: no layer), ``window:256:sinks=4``, ``full``.

        Options that are not written have the policy's own defaults. ``amount`` is for texts that name none.

        Raises:
            InputError: unknown policy or option, or an amount that is neither a count of entries nor a ratio in (0, 1].
        """
        name, *rest = text.strip().split(":")
        kind = kind_named(name)
        written = parse_amount(rest.pop(0)) if rest and "=" not in rest[0] else None
        if written is not None and amount is not None:
            raise InputError(f"policy {text!r} names an amount already")
        options = dict(part.partition("=")[::2] for part in rest)
        if len(options) < len(rest) or not options.keys() <= {"skip", "sinks", "recent", "seed"}:
            raise InputError(f"no policy {text!r}", hint=GRAMMAR)
        if kind.score is None:
            amount = None
        bare: dict[str, Any] = {"skip_layers": kind.skip_layers, "sinks": kind.sinks, "recent": kind.recent}
        try:
            bare |= {name: int(options[name]) for name in ("sinks", "seed") if name in options}
            if "skip" in options:
                bare["skip_layers"] = tuple(sorted({int(part) for part in options["skip"].split(",") if part}))
        except ValueError:
            raise InputError(f"no policy {text!r}", hint=GRAMMAR) from None
        if "recent" in options:
            bare["recent"] = parse_amount(options["recent"])
        return cls(kind.name, **_amount(written if written is not None else amount), **bare)

    def at(self, amount: int | Fraction) -> KVPolicy:
        """The same policy with another number of entries (an int) or ratio (a Fraction)."""
        return self if self.kind == "full" else replace(self, **_amount(amount))

    def newest(self, kept: int) -> int:
        """How many of ``kept`` entries are reserved for the newest tokens."""
        return int(self.recent * kept) if isinstance(self.recent, Fraction) else self.recent

    def entries(self, layer: int, tokens: int) -> int:
        """Entries that a layer holds in steady state after ``tokens`` tokens."""
        if layer in self.skip_layers:
            return tokens
        if self.budget is not None:
            return min(tokens, self.budget)
        if self.keep_ratio is None:
            return tokens
        return -(-tokens * self.keep_ratio.numerator // self.keep_ratio.denominator)

    def __str__(self) -> str:
        kind = KINDS[self.kind]
        parts = [self.kind]
        if self.budget is not None:
            parts.append(str(self.budget))
        elif self.keep_ratio is not None:
            parts.append(_ratio(self.keep_ratio))
        if self.skip_layers or kind.skip_layers:
            parts.append(f"skip={','.join(map(str, self.skip_layers))}")
        if self.sinks != kind.sinks:
            parts.append(f"sinks={self.sinks}")
        if self.recent != kind.recent:
            parts.append(f"recent={_ratio(self.recent) if isinstance(self.recent, Fraction) else self.recent}")
        if self.seed:
            parts.append(f"seed={self.seed}")
        return ":".join(parts)


def parse_amount(text: str) -> int | Fraction:
    """``512``: entries. ``0.5``, ``1/8``, ``1.0``: a ratio.

    Raises:
        InputError: neither.
    """
    match = _AMOUNT.fullmatch(text.strip())
    try:
        if match is not None:
            return int(match["count"]) if match["count"] else Fraction(match["ratio"])
    except ZeroDivisionError:
        pass
    raise InputError(f"{text!r} is neither a number of entries (512) nor a ratio (0.5, 1/8)")


def _amount(amount: int | Fraction | None) -> dict[str, Any]:
    if isinstance(amount, Fraction):
        return {"keep_ratio": amount, "budget": None}
    return {"budget": amount, "keep_ratio": None}


def _ratio(ratio: Fraction) -> str:
    """Decimal where that is exact in the grammar's six digits."""
    return str(float(ratio)) if 10**6 % ratio.denominator == 0 else f"{ratio.numerator}/{ratio.denominator}"
