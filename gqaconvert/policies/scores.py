"""The policies. One function each: scores of a layer's entries, and the highest stay. Importing this needs no torch.

A policy is registered by ``@policy("name")`` with what it does unless told otherwise; nothing else has to know it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from gqaconvert.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from gqaconvert.policies.step import Step

Score = Callable[["Step"], "Tensor"]
"""Scores, float32: (B, KV heads, n) where each KV head decides for itself, (B, 1, n) for one decision a layer."""


@dataclass(frozen=True)
class Kind:
    """One policy.

    Attributes:
        name: as on the command line.
        score: of the entries; None for the policy that keeps everything.
        skip_layers: layers that keep everything unless ``skip=`` says otherwise.
        sinks: first tokens that always stay unless ``sinks=`` says otherwise.
        recent: newest tokens that always stay (a fraction: of those kept) unless ``recent=`` says otherwise.
        accumulates: the score needs the attention of all queries so far (`Step.received`).
        summary: the first line of the function's docstring.
    """

    name: str
    score: Score | None
    skip_layers: tuple[int, ...] = ()
    sinks: int = 0
    recent: int | Fraction = 0
    accumulates: bool = False
    summary: str = ""


KINDS: dict[str, Kind] = {
    "full": Kind("full", None, summary="Everything stays: what the others are measured against."),
}
"""By name, in the order in which people see them."""


def policy(
    name: str,
    *,
    skip_layers: tuple[int, ...] = (),
    sinks: int = 0,
    recent: int | Fraction = 0,
    accumulates: bool = False,
) -> Callable[[Score], Score]:
    """Register a function as the policy ``name``; see `Kind` for the rest."""

    def register(score: Score) -> Score:
        summary = (score.__doc__ or "").partition("\n")[0]
        KINDS[name] = Kind(name, score, skip_layers, sinks, recent, accumulates, summary)
        return score

    return register


def kind_named(name: str) -> Kind:
    """The policy with this name.

    Raises:
        InputError: there is none; the closest names are in the hint.
    """
    if name in KINDS:
        return KINDS[name]
    close = difflib.get_close_matches(name, KINDS, n=3, cutoff=0.4)
    raise InputError(f"no policy {name!r}", hint=f"{'closest' if close else 'known'}: {', '.join(close or KINDS)}")


@policy("tova")
def tova(step: Step) -> Tensor:
    """Attention of the newest token, mean over the layer's query heads (Oren et al., EMNLP 2024, algorithm 1)."""
    return step.attention().flatten(1, 2).mean(dim=1, keepdim=True)


@policy("tova-head")
def tova_head(step: Step) -> Tensor:
    """As tova, but each KV head decides by the mean over its own query heads (the paper's TOVA-head, table 3)."""
    return step.attention().mean(dim=2)


@policy("l2", skip_layers=(0, 1))
def l2(step: Step) -> Tensor:
    """Keys of low L2 norm stay, for each KV head (Devoto et al., EMNLP 2024, section 3); layers 0 and 1 are left."""
    return -step.key_norms()


@policy("l2-high", skip_layers=(0, 1))
def l2_high(step: Step) -> Tensor:
    """Keys of high L2 norm stay: the L2 paper's control, which should be worse than random."""
    return step.key_norms()


@policy("window")
def window(step: Step) -> Tensor:
    """The newest tokens stay."""
    return step.positions.float()


@policy("window+sinks", sinks=4)
def window_sinks(step: Step) -> Tensor:
    """The first four tokens and the newest stay (Xiao et al., ICLR 2024; positions are not renumbered)."""
    return step.positions.float()


@policy("h2o", recent=Fraction(1, 2), accumulates=True)
def h2o(step: Step) -> Tensor:
    """Attention received from all queries so far, for each KV head; half of what is kept is the newest.

    Zhang et al., NeurIPS 2023, section 4.1. Queries that share a KV head are summed.
    """
    return step.received()


@policy("random")
def random(step: Step) -> Tensor:
    """A uniform sample of the tokens so far, for each KV head: the control. ``seed=N`` gives another one.

    The rank of a token is a hash of seed, layer, head and position, so that it does not depend on the batch, on the
    chunks or on the machine.
    """
    mask = 2**31 - 1
    state = step.positions + 1 + step.heads * 1_000_003 + step.layer * 7_919 + step.seed * 104_729
    for factor in (1_103_515_245, 1_664_525, 69_069):  # products of two 31-bit numbers stay within int64
        state = ((state & mask) * factor) & mask
        state = state ^ (state >> 15)
    return (state >> 7).float()  # 24 bits: every one is a float32 of its own
