"""Refining a merged layer: fit its attention to what the original layer computed, on calibration text, without labels.

Layer by layer, in order, each fed by the layers that were already merged and refined: the attention's parameters move
until residual stream plus attention output is that of the original model, so that a layer also corrects what earlier
ones did wrong. The error is squared and divided by the target stream's energy token by token, as the norm that
follows will do.

The optimiser is Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon): the update of a matrix is the
orthogonal factor of its momentum. Inputs of decoder layers have a few directions that are orders of magnitude larger
than the rest; Adam, at the same cost, leaves half of the error that Muon removes (see tests/bench/fidelity).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gqaconvert.merge.moments import Call, attention_call, observe, second_moment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

_MOMENTUM = 0.9
_WARMUP_STEPS = 4
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's quintic iteration: singular values of a scaled matrix go to about 1 in five rounds."""
_AUTO_CYCLES = 4
_AUTO_GAIN = 0.03
"""Automatic refinement goes on while a cycle takes at least this share off the held-out error."""


@dataclass(frozen=True)
class RefineSettings:
    """How to refine a layer.

    Attributes:
        steps: of the optimiser; in automatic mode, of one cycle. 0 leaves the layer as it was merged.
        automatic: repeat cycles as long as the held-out error falls.
        learning_rate: size of a step relative to a matrix's root-mean-square entry; falls linearly to zero.
        batches_per_step: calibration batches in one step.
        held_out: batches at the end of the calibration text that are not fitted but measure the error.
        seed: decides the order of batches.
    """

    steps: int = 24
    automatic: bool = False
    learning_rate: float = 0.04
    batches_per_step: int = 4
    held_out: int = 2
    seed: int = 0


@dataclass(frozen=True)
class Sample:
    """One batch of what the merged attention must learn.

    Attributes:
        call: its inputs.
        target: (batch, tokens, E), the output that makes the residual stream right.
        weight: (batch, tokens), one over the energy of the target stream.
    """

    call: Call
    target: Tensor
    weight: Tensor


@dataclass(frozen=True)
class Refinement:
    """Held-out error of a layer: squared, relative to the residual stream's energy.

    Attributes:
        before: of the merged layer as it was.
        after: of the refined layer; never above ``before``, as a refinement that does harm is undone.
        steps: that were taken.
    """

    before: float
    after: float
    steps: int


@dataclass(frozen=True)
class Streams:
    """Residual streams at the input of a layer, batch by batch (batch, tokens, E), in both models."""

    original: list[Tensor]
    merged: list[Tensor]


def merge_layer(
    original: nn.Module,
    merged: nn.Module,
    attention: str,
    call: Call,
    streams: Streams,
    merge: Callable[[Tensor], None],
    settings: RefineSettings,
    *,
    bias: bool = False,
    adds_to_stream: bool = True,
) -> tuple[Refinement, Streams]:
    """Merge one layer with its calibration moment, refine it, and hand the streams on to the next layer.

    Args:
        original: a stock decoder layer, float32.
        merged: its counterpart with fewer KV heads, float32; of its attention, the parameters that require
            gradients are refined.
        attention: path of the attention inside a layer, e.g. ``self_attn``.
        call: what the model passes to this layer, from ``record_calls``.
        streams: at the layer's input.
        merge: called once with the moment (E', E') of the merged model's attention input; must write the merged
            weights into ``merged``.
        settings: of the refinement.
        bias: the moment includes the constant 1 of projections with a bias.
        adds_to_stream: the attention's output is added to the layer's input as it is. False where a norm stands
            between (Gemma 2, OLMo 2): then the original attention's output is the target, without the correction.

    Returns:
        The error before and after, and the streams at the layer's output.
    """
    source, target = original.get_submodule(attention), merged.get_submodule(attention)
    outputs, samples = [], []
    for before, drifted in zip(streams.original, streams.merged, strict=True):
        output, attended = observe(original, source, call, before)
        outputs.append(output)
        wanted = before + attended
        energy = wanted.square().sum(-1) if adds_to_stream else attended.square().sum(-1)
        weight = 1 / energy.clamp_min(torch.finfo(energy.dtype).tiny)
        inputs = attention_call(merged, target, call, drifted)
        samples.append(Sample(inputs, wanted - drifted if adds_to_stream else attended, weight))
    merge(second_moment([sample.call.hidden for sample in samples], bias=bias))
    refinement = refine_attention(target, samples, settings)
    with torch.no_grad():
        moved = [call.run(merged, drifted) for drifted in streams.merged]
    return refinement, Streams(outputs, moved)


def refine_attention(attention: nn.Module, samples: Sequence[Sample], settings: RefineSettings) -> Refinement:
    """Fit the parameters of an attention module that require gradients to its samples, in place.

    Args:
        attention: any module whose first output is the attention output.
        samples: calibration batches; the last ``settings.held_out`` of them only measure.
        settings: of the refinement.

    Raises:
        ValueError: no batch is left to fit.
    """
    fitted, held = _split(samples, settings.held_out)
    best = before = mean_error(attention, held)
    steps = 0
    for cycle in range(_AUTO_CYCLES if settings.automatic else 1):
        kept = {name: parameter.detach().clone() for name, parameter in attention.named_parameters()}
        _descend(attention, fitted, settings, cycle)
        error = mean_error(attention, held)
        if not error < best:
            with torch.no_grad():
                for name, parameter in attention.named_parameters():
                    parameter.copy_(kept[name])
            break
        gain, best, steps = 1 - error / best, error, steps + settings.steps
        if gain < _AUTO_GAIN:
            break
    return Refinement(before, best, steps)


def _split(samples: Sequence[Sample], held_out: int) -> tuple[Sequence[Sample], Sequence[Sample]]:
    if not 0 < held_out < len(samples):
        raise ValueError(f"{len(samples)} batches of calibration text are too few to hold {held_out} out")
    return samples[:-held_out], samples[-held_out:]


def _loss(attention: nn.Module, sample: Sample) -> Tensor:
    error = sample.call.run(attention) - sample.target
    return (error.square().sum(-1) * sample.weight).mean()


@torch.no_grad()
def mean_error(attention: nn.Module, samples: Sequence[Sample]) -> float:
    """Mean over samples of the relative squared error."""
    return sum(float(_loss(attention, sample)) for sample in samples) / len(samples)


def _descend(attention: nn.Module, samples: Sequence[Sample], settings: RefineSettings, cycle: int) -> None:
    order = _Order(len(samples), settings.seed * _AUTO_CYCLES + cycle)
    muon = _Muon([attention], settings.learning_rate, settings.steps)
    for _ in range(settings.steps):
        for _ in range(min(settings.batches_per_step, len(samples))):
            muon.add(_loss(attention, samples[order.next()]))
        muon.step()


class _Order:
    """Endless passes over ``count`` items, each in a new order."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._generator = torch.Generator().manual_seed(seed)
        self._left: list[int] = []

    def next(self) -> int:
        if not self._left:
            self._left = torch.randperm(self._count, generator=self._generator).tolist()
        return self._left.pop()


class _Muon:
    """Muon on the parameters of some modules that require gradients, each at a pace relative to its own size.

    The rate rises over a few steps, then falls linearly to 0.
    """

    def __init__(self, modules: Sequence[nn.Module], learning_rate: float, steps: int) -> None:
        self._parameters = [part for module in modules for part in module.parameters() if part.requires_grad]
        self._pace = [float(part.detach().square().mean().sqrt()) for part in self._parameters]
        self._gradients = [torch.zeros_like(part) for part in self._parameters]
        self._momentum = [torch.zeros_like(part) for part in self._parameters]
        self._learning_rate, self._steps, self._done = learning_rate, steps, 0

    def add(self, loss: Tensor) -> None:
        """Add the gradient of a loss to the next step's."""
        for total, part in zip(self._gradients, torch.autograd.grad(loss, self._parameters), strict=True):
            total.add_(part)

    @torch.no_grad()
    def step(self) -> None:
        """Move the parameters and begin the next step."""
        rate = self._learning_rate * min((self._done + 1) / _WARMUP_STEPS, 1 - self._done / self._steps)
        for part, size, gradient, moving in zip(
            self._parameters, self._pace, self._gradients, self._momentum, strict=True
        ):
            moving.mul_(_MOMENTUM).add_(gradient)
            part.sub_(rate * size * orthogonal_step(gradient + _MOMENTUM * moving))
            gradient.zero_()
        self._done += 1


@dataclass(frozen=True)
class JointSettings:
    """How to refine all layers together.

    Attributes:
        steps: of the optimiser.
        learning_rate: size of a step relative to a matrix's root-mean-square entry; falls linearly to zero.
        batches_per_step: calibration batches in one step.
        seed: decides the order of batches.
    """

    steps: int = 12
    learning_rate: float = 0.005
    batches_per_step: int = 4
    seed: int = 0


def refine_jointly(
    original: nn.Module,
    merged: nn.Module,
    attentions: Sequence[nn.Module],
    batches: Sequence[Tensor],
    settings: JointSettings,
    progress: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Fit all attention modules of a merged model at once to the original's next-token distributions, in place.

    The loss is the Kullback-Leibler divergence from the original's to the merged model's distribution (Hinton et al.,
    2015, at temperature 1), so that errors count as much as they matter for what the model says. Both models are in
    memory, and activations of the whole model for one batch.

    Args:
        original: a stock model that returns ``logits``, float32.
        merged: its merged counterpart.
        attentions: the attention modules of ``merged``; their parameters that require gradients are fitted.
        batches: (batch, tokens) token ids, best ones that no layer has been fitted to.
        settings: of the refinement.
        progress: called after each step with the step's number and the mean divergence in nats.

    Returns:
        The mean divergence of each step's batches, before that step.
    """
    order, losses = _Order(len(batches), settings.seed), []
    share = min(settings.batches_per_step, len(batches))
    muon = _Muon(attentions, settings.learning_rate, settings.steps)
    for step in range(settings.steps):
        total = 0.0
        for _ in range(share):
            loss = divergence(original, merged, batches[order.next()]) / share
            muon.add(loss)
            total += float(loss.detach())
        muon.step()
        losses.append(total)
        if progress is not None:
            progress(step, total)
    return losses


def divergence(original: nn.Module, merged: nn.Module, token_ids: Tensor) -> Tensor:
    """Mean over tokens of KL(original || merged) of the next-token distributions, in nats."""
    with torch.no_grad():
        wanted = original(input_ids=token_ids, use_cache=False).logits.log_softmax(-1)
    found = merged(input_ids=token_ids, use_cache=False).logits.log_softmax(-1)
    loss: Tensor = (wanted.exp() * (wanted - found)).sum(-1).mean()
    return loss


def orthogonal_step(direction: Tensor) -> Tensor:
    """About the orthogonal factor of a matrix, scaled to entries of root-mean-square about 1; a vector is one row."""
    matrix = direction.reshape(-1, direction.shape[-1]) if direction.ndim > 1 else direction.reshape(1, -1)
    norm = matrix.norm()
    if not norm > 0:
        return torch.zeros_like(direction)
    tall = matrix.shape[0] > matrix.shape[1]
    current = (matrix.mT if tall else matrix) / norm
    a, b, c = _NEWTON_SCHULZ
    for _ in range(5):
        gram = current @ current.mT
        current = a * current + (b * gram + c * gram @ gram) @ current
    step: Tensor = (current.mT if tall else current) * max(matrix.shape) ** 0.5
    return step.reshape(direction.shape)
