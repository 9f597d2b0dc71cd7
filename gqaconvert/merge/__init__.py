"""Ways to make one KV head out of several.

A pooling method sees K or V of a group alone and is one function in `pooling`. A site method sees the whole attention
module, because it also rewrites Q and O so that they undo what it does to K and V.
"""

import difflib

from gqaconvert.errors import InputError
from gqaconvert.merge.pooling import POOLING, Pooling

__all__ = ["POOLING", "SITE_METHODS", "Pooling", "check_method", "pooling_of"]

SITE_METHODS = {
    "subspace": "the best common subspace of the group's heads, undone in Q and O",
    "align": "heads rotated onto each other, then their mean (Procrustes)",
}


def check_method(name: str) -> None:
    """Check that a method exists.

    Raises:
        InputError: there is none with this name.
    """
    known = [*POOLING, *SITE_METHODS]
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(f"no merge method {name!r}", hint=f"{hint}known: {', '.join(known)}")


def pooling_of(method: str) -> Pooling:
    """How a method pools what it only pools: site methods take the mean, e.g. of key norms."""
    return POOLING[method if method in POOLING else "mean"]
