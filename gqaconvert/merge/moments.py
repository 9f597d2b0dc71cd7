"""What calibration text looks like from inside one layer: the layer's inputs, its attention's, and their moments.

Everything works on one stock transformers decoder layer at a time and on a list of batches, so that a caller that
loads layers one after another never holds more than one layer and the activations of the calibration text. Nothing
here knows a model family: what a model passes to its layers besides hidden states (rotary tables, masks) is recorded
once, and what a layer passes to its attention is seen by hooks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a module: its hidden states, and everything else as it was passed.

    Attributes:
        hidden: (batch, tokens, E).
        name: the keyword by which the hidden states were passed, None for the first positional argument.
        args: further positional arguments.
        kwargs: other keyword arguments.
    """

    hidden: Tensor
    name: str | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self, module: nn.Module, hidden: Tensor | None = None) -> Tensor:
        """Call a module with these arguments, or with other hidden states; the first of its outputs."""
        args, kwargs = self.arguments(hidden)
        return first_output(module(*args, **kwargs))

    def arguments(self, hidden: Tensor | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments, with other hidden states if given."""
        hidden = self.hidden if hidden is None else hidden
        if self.name is None:
            return (hidden, *self.args), dict(self.kwargs)
        return self.args, {**self.kwargs, self.name: hidden}


class _Stop(Exception):  # noqa: N818  (no error: it ends a forward pass early)
    pass


def first_output(result: object) -> Tensor:
    """A module's hidden states, whether it returns a tensor or a tuple that begins with one."""
    if isinstance(result, (tuple, list)):
        result = result[0]
    assert isinstance(result, Tensor)
    return result


def _as_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    if args:
        return Call(args[0].detach(), None, tuple(args[1:]), kwargs)
    rest = {key: value for key, value in kwargs.items() if key != "hidden_states"}
    return Call(kwargs["hidden_states"].detach(), "hidden_states", (), rest)


@torch.no_grad()
def record_calls(model: nn.Module, layers: Sequence[nn.Module], token_ids: Tensor) -> list[Call]:
    """What a model passes to each of its layers for one batch of tokens.

    The hidden states of the first call are the embeddings. The other arguments depend on the batch's shape only (rotary
    tables, causal or sliding masks), so that they serve for every batch of this shape.

    Args:
        model: a stock decoder; called with ``input_ids`` and ``use_cache=False``.
        layers: its decoder layers, in order. They are not run: each hands its hidden states on.
        token_ids: (batch, tokens).
    """
    calls: list[Call] = []
    forwards = [layer.forward for layer in layers]

    def recorder(index: int) -> Any:  # noqa: ANN401  (takes a layer's place; its signature is the model's business)
        def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            calls.append(_as_call(args, kwargs))
            if index == len(layers) - 1:
                raise _Stop
            return calls[-1].hidden

        return forward

    try:
        for index, layer in enumerate(layers):
            layer.forward = recorder(index)
        model(input_ids=token_ids, use_cache=False)
    except _Stop:
        pass
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            layer.forward = forward
    return calls


@torch.no_grad()
def observe(layer: nn.Module, attention: nn.Module, call: Call, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Run a layer on one batch: its output, and its attention's output, both (batch, tokens, E)."""
    seen: list[Tensor] = []
    hook = attention.register_forward_hook(lambda _module, _args, result: seen.append(first_output(result)))
    try:
        output = call.run(layer, hidden)
    finally:
        hook.remove()
    return output, seen[0]


@torch.no_grad()
def attention_call(layer: nn.Module, attention: nn.Module, call: Call, hidden: Tensor) -> Call:
    """The call of a layer's attention for one batch of the layer's inputs; nothing after it is computed."""
    seen: list[Call] = []

    def stop(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(_as_call(args, kwargs))
        raise _Stop

    hook = attention.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        call.run(layer, hidden)
    except _Stop:
        pass
    finally:
        hook.remove()
    return seen[0]


@torch.no_grad()
def attention_entropy(layer: nn.Module, attention: nn.Module, call: Call, hidden: Tensor) -> float | None:
    """Mean entropy of the attention weights over query positions and heads, in nats.

    Args:
        layer: a decoder layer.
        attention: the attention module inside it.
        call: recorded with the eager implementation, whose masks are explicit.
        hidden: the layer's input.

    Returns:
        None if the module does not give its weights away.
    """
    config = getattr(attention, "config", None)
    if config is None:
        return None
    chosen = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        inner = attention_call(layer, attention, call, hidden)
        args, kwargs = inner.arguments()
        result = attention(*args, **kwargs)
    finally:
        config._attn_implementation = chosen
    weights = result[1] if isinstance(result, tuple) and len(result) > 1 else None
    if not isinstance(weights, Tensor) or weights.ndim != 4:
        return None
    return float(torch.special.entr(weights.double()).sum(-1).mean())


@torch.no_grad()
def second_moment(batches: Sequence[Tensor], *, bias: bool = False) -> Tensor:
    """Mean of x x^T over all tokens, (E', E') in float64.

    Args:
        batches: (..., E) each, of any float type.
        bias: append a constant 1 to x, for projections with a bias column.

    Raises:
        ValueError: there are no tokens.
    """
    count = sum(batch.numel() // batch.shape[-1] for batch in batches)
    if not count:
        raise ValueError("a second moment needs at least one token")
    width = batches[0].shape[-1] + bias
    total = torch.zeros(width, width, dtype=torch.float64, device=batches[0].device)
    for batch in batches:
        rows = batch.reshape(-1, batch.shape[-1]).to(torch.float64)
        if bias:
            rows = torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)
        total.addmm_(rows.T, rows)
    return total / count
