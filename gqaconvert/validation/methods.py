"""What each merge method promises about its output: the table that decides what the files level may ask."""

from dataclasses import dataclass
from typing import Literal

Promise = Literal["mean", "first", "drawn", "spans"]


@dataclass(frozen=True)
class Expectation:
    """The promise of one method.

    Attributes:
        promise: mean and first say every number; drawn says that they are fresh; spans says that every merged head is
            a combination of its group's rows, and that Q and O stay within theirs.
        rewrites_queries: whether Q and O may change too.
    """

    promise: Promise
    rewrites_queries: bool = False


EXPECTATIONS: dict[str, Expectation] = {
    "mean": Expectation("mean"),
    "first": Expectation("first"),
    "random": Expectation("drawn"),
    "subspace": Expectation("spans", rewrites_queries=True),
    "align": Expectation("spans", rewrites_queries=True),
}
