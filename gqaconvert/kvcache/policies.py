"""Cache policies as arithmetic: how many entries a layer holds after so many tokens. No torch."""

import re
from dataclasses import dataclass
from fractions import Fraction

from gqaconvert.errors import InputError

DEFAULT_SKIP: dict[str, tuple[int, ...]] = {"tova": (), "l2": (0, 1), "window": ()}
"""Policies that can be asked for, and the layers that each leaves alone unless told otherwise.

L2 (Devoto et al., EMNLP 2024, section 3) skips the first two layers; TOVA (Oren et al., EMNLP 2024) skips none.
"""


@dataclass(frozen=True)
class PolicySize:
    """One policy's arithmetic.

    Attributes:
        kind: "tova", "l2" or "window" (the newest entries).
        budget: entries that a layer keeps at most, None if a ratio is given.
        keep_ratio: part of the tokens that a layer keeps, None if a budget is given.
        skip_layers: layers that keep everything.
    """

    kind: str
    budget: int | None = None
    keep_ratio: Fraction | None = None
    skip_layers: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "PolicySize":
        """``tova:512``, ``l2:0.5`` or ``l2:0.5:skip=0,1`` (``skip=`` alone: no layer).

        Raises:
            InputError: unknown kind, or an amount that is neither a count of entries nor a ratio in (0, 1].
        """
        match = re.fullmatch(r"(\w+):(\d{1,9}|\d?\.\d{1,6}|1\.0+)(?::skip=([\d,]*))?", text.strip())
        if match is None or match[1] not in DEFAULT_SKIP:
            raise InputError(
                f"no policy {text!r}",
                hint=f"KIND:ENTRIES or KIND:RATIO[:skip=LAYERS], with one of {', '.join(DEFAULT_SKIP)}; e.g. tova:512",
            )
        skip = DEFAULT_SKIP[match[1]]
        if match[3] is not None:
            skip = tuple(sorted({int(part) for part in match[3].split(",") if part}))
        if "." in match[2]:
            ratio = Fraction(match[2])
            if not 0 < ratio <= 1:
                raise InputError(f"policy {text!r}: the ratio is the part that is kept, in (0, 1]")
            return cls(match[1], keep_ratio=ratio, skip_layers=skip)
        if int(match[2]) < 1:
            raise InputError(f"policy {text!r}: at least one entry has to stay")
        return cls(match[1], budget=int(match[2]), skip_layers=skip)

    def entries(self, layer: int, tokens: int) -> int:
        """Entries that a layer holds in steady state after ``tokens`` tokens."""
        if layer in self.skip_layers:
            return tokens
        if self.budget is not None:
            return min(tokens, self.budget)
        assert self.keep_ratio is not None
        return -(-tokens * self.keep_ratio.numerator // self.keep_ratio.denominator)

    def __str__(self) -> str:
        amount = self.budget if self.budget is not None else float(self.keep_ratio or 0)
        skipped = ",".join(map(str, self.skip_layers))
        return f"{self.kind}:{amount}" + (f":skip={skipped}" if skipped else "")
