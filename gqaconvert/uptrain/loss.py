"""The losses, summed over tokens, so that a step's mean does not depend on how its batch was divided."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gqaconvert.uptrain.job import Loss
from gqaconvert.uptrain.packing import IGNORED, Batch


@dataclass(frozen=True)
class Sums:
    """Losses of some rows, summed over the tokens that are predicted, in nats.

    Attributes:
        total: what is trained on; carries the gradient.
        lm: -log p of the next token; None where it is not computed.
        kl: KL(teacher || model); None without a teacher.
    """

    total: Tensor
    lm: Tensor | None
    kl: Tensor | None


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum of -log p(label) over labels (B, T) that are not `IGNORED`, of logits (B, T, V), in nats."""
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def divergence(logits: Tensor, teacher: Tensor, labels: Tensor) -> Tensor:
    """Sum of KL(teacher || model) over the same places, in nats (Hinton et al. 2015, at temperature 1)."""
    kept = labels.flatten() != IGNORED
    wanted = teacher.flatten(0, 1)[kept].float().log_softmax(-1)
    found = logits.flatten(0, 1)[kept].float().log_softmax(-1)
    return torch.nn.functional.kl_div(found, wanted, log_target=True, reduction="sum")


def model_inputs(batch: Batch, *, encoder_decoder: bool) -> tuple[dict[str, Any], Tensor]:
    """Arguments of a stock model, and the labels that its logits are judged by, place by place: (B, T) int64.

    A decoder predicts every next token. An encoder-decoder reads the first half of a row and predicts the second
    (prefix language modelling: Raffel et al. 2020, section 3.2.3); the stock class shifts what its decoder reads.
    """
    if encoder_decoder:
        half = batch.input_ids.shape[1] // 2
        labels = batch.labels[:, half:].contiguous()
        return {"input_ids": batch.input_ids[:, :half].contiguous(), "labels": labels, "use_cache": False}, labels
    return batch.inputs(), torch.nn.functional.pad(batch.labels[:, 1:], (0, 1), value=IGNORED)


def loss_sums(
    model: Any,  # noqa: ANN401
    batch: Batch,
    *,
    loss: Loss,
    teacher: Any = None,  # noqa: ANN401
    encoder_decoder: bool = False,
) -> Sums:
    """The losses of a model on some rows.

    Args:
        model: is called and gives logits.
        batch: on the model's device.
        loss: "lm", "distill", or "mixed": half of each.
        teacher: a model of the same vocabulary, for the last two.
        encoder_decoder: the kind of model.
    """
    inputs, labels = model_inputs(batch, encoder_decoder=encoder_decoder)
    logits = model(**inputs).logits
    if loss == "lm":
        lm = cross_entropy(logits, labels)
        return Sums(lm, lm.detach(), None)
    with torch.no_grad():
        wanted = teacher(**inputs).logits
    kl = divergence(logits, wanted, labels)
    if loss == "distill":
        with torch.no_grad():
            return Sums(kl, cross_entropy(logits, labels), kl.detach())
    lm = cross_entropy(logits, labels)
    return Sums((lm + kl) / 2, lm.detach(), kl.detach())


@torch.no_grad()
def evaluate(model: Any, batches: Iterable[Batch], *, encoder_decoder: bool = False) -> float:  # noqa: ANN401
    """Mean -log p of the next token in nats, over all tokens that are predicted; float64 over the batches."""
    training = model.training
    model.eval()
    total, count = 0.0, 0
    device = next(model.parameters()).device
    try:
        for batch in batches:
            inputs, labels = model_inputs(batch.to(device), encoder_decoder=encoder_decoder)
            total += float(cross_entropy(model(**inputs).logits, labels))
            count += int((labels != IGNORED).sum())
    finally:
        model.train(training)
    return total / count
