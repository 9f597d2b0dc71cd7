"""The attention function that evicts: the model's own, then the policy. Needs transformers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gqaconvert.errors import InputError, UnsupportedModelError
from gqaconvert.policies.cache import take_updated

PREFIX = "gqaconvert_"
BASES = ("sdpa", "eager")
"""Implementations whose masks have a column for every token, which can be picked by entry."""


def register(base: str) -> str:
    """The name under which transformers finds this function on top of an implementation; registers it.

    Raises:
        InputError: the implementation has no masks that can be picked from.
    """
    if base not in BASES:
        raise InputError(
            f"cache policies cannot work on top of the attention implementation {base!r}",
            hint=f"load the model with attn_implementation={' or '.join(map(repr, BASES))}",
        )
    name = PREFIX + base
    AttentionInterface.register(name, partial(attend, base))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    return name


def attend(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor | None]:
    """Attention of (B, H, q, D) over a layer's entries; if they are under a policy, it then decides which stay.

    Raises:
        InputError: the attention has a bias for each position, or masks for each head.
        UnsupportedModelError: it does not attend to what its cache holds, or more than once.
    """
    stock = _stock(base, module)
    layer = take_updated(module)
    if layer is None:
        return stock(module, query, key, value, attention_mask, **kwargs)
    if key.shape[2] != layer.entries[0].shape[2]:
        raise UnsupportedModelError(f"{type(module).__name__} attends to other entries than those its cache holds")
    if kwargs.get("position_bias") is not None:
        raise InputError(f"{type(module).__name__} adds a bias for each position, which cache policies do not support")
    own = layer.own_mask(attention_mask, query.shape[1])
    output, weights = stock(module, query, key, value, own, **kwargs)
    scaling = kwargs.get("scaling")
    layer.evict(query, attention_mask, own, query.shape[-1] ** -0.5 if scaling is None else scaling, weights)
    return output, weights


def _stock(base: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """What the module would have called. The eager form is a function beside the class, with what is special to it."""
    modeling = sys.modules[type(module).__module__]
    found: Any = (
        getattr(modeling, "eager_attention_forward", None)
        if base == "eager"
        else getattr(modeling, "ALL_ATTENTION_FUNCTIONS", ALL_ATTENTION_FUNCTIONS)[base]
    )
    if found is None:
        raise UnsupportedModelError(f"{type(module).__name__} has no {base} attention function of its own")
    return found  # type: ignore[no-any-return]
