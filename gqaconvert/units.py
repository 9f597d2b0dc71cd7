"""Sizes for people and from people."""

import re

KIB, MIB, GIB = 2**10, 2**20, 2**30

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 2**40,
}


def format_size(nbytes: int) -> str:
    """Bytes in the binary unit that a person can read, e.g. ``3.05 MiB``."""
    value = float(nbytes)
    for unit in ("bytes", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{nbytes} bytes" if unit == "bytes" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:,.2f} GiB"


def parse_size(text: str) -> int:
    """Bytes of ``5GB`` (decimal), ``500MiB`` (binary) or a plain number.

    Raises:
        ValueError: the text is not a positive size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?i?b)?\s*", text, re.IGNORECASE)
    size = int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
    if size <= 0:
        raise ValueError(f"{text!r} is not a size: write a number and a unit, e.g. 5GB or 500MiB")
    return size
