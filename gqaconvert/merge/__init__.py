"""Ways to make one KV head out of several."""

import difflib

from gqaconvert.errors import InputError
from gqaconvert.merge.pooling import POOLING, Pooling

__all__ = ["POOLING", "Pooling", "get_pooling"]


def get_pooling(name: str) -> Pooling:
    """The pooling method with this name.

    Raises:
        InputError: there is none.
    """
    if name not in POOLING:
        close = difflib.get_close_matches(name, POOLING, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise InputError(f"no merge method {name!r}", hint=f"{hint}known: {', '.join(POOLING)}")
    return POOLING[name]
