"""Rows of tokens as a model takes them: labels, positions, and where documents end.

B rows, T tokens a row. A document ends with the end-of-text token; what a row holds of the next one begins after it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gqaconvert.errors import UnsupportedModelError

IGNORED = -100
"""Label of a position that is not to be predicted; the convention of torch and transformers."""
PACKINGS = ("concat", "document")


@dataclass(frozen=True)
class Batch:
    """Rows of tokens.

    Attributes:
        input_ids: (B, T) int64.
        labels: (B, T) int64, at the place of the token itself (the model shifts them, as transformers does);
            `IGNORED` where a token is not predicted: the first of a row, and with packing by document the first of
            each document.
        position_ids: (B, T) int64, beginning at 0 with each document; None with packing by concatenation.
        document_ids: (B, T) int64, counting a row's documents from 0; None with packing by concatenation.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None = None
    document_ids: Tensor | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def predicted(self) -> int:
        """Tokens that the loss is a mean over."""
        return int((self.labels != IGNORED).sum())

    def inputs(self) -> dict[str, Any]:
        """What a causal model of transformers is called with.

        With packing by document the mask is left to transformers: where no mask and no cache are given, it makes a
        block-diagonal causal one (windows included) from positions that begin anew. `documents_are_apart` tells
        whether a model's class does so.
        """
        positions = {} if self.position_ids is None else {"position_ids": self.position_ids}
        return {"input_ids": self.input_ids, "use_cache": False, **positions}

    def attention_mask(self) -> Tensor:
        """(B, 1, T, T) bool: which tokens see which. For classes that need the mask itself, and for tests."""
        rows, length = self.input_ids.shape
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        if self.document_ids is None:
            return causal.expand(rows, 1, length, length)
        same = self.document_ids[:, :, None] == self.document_ids[:, None, :]
        return (same & causal)[:, None]

    def part(self, rank: int, world: int) -> "Batch":
        """The rows of one of ``world`` processes: every world-th."""
        return self._rows(slice(rank, None, world))

    def micro(self, size: int) -> Iterator["Batch"]:
        """The rows in turns of at most ``size``."""
        for start in range(0, len(self), size):
            yield self._rows(slice(start, start + size))

    def to(self, device: torch.device | str) -> "Batch":
        """The same on another device."""
        return Batch(*(None if tensor is None else tensor.to(device) for tensor in self._tensors()))  # type: ignore[arg-type]

    def _rows(self, rows: slice) -> "Batch":
        return Batch(*(None if tensor is None else tensor[rows] for tensor in self._tensors()))  # type: ignore[arg-type]

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.input_ids, self.labels, self.position_ids, self.document_ids


def make_batch(rows: NDArray[np.int64], *, packing: str, end: int | None) -> Batch:
    """Rows of token ids (B, T) as a batch; ``end`` is the token that ends a document."""
    tokens = torch.from_numpy(rows)
    labels = tokens.clone()
    labels[:, 0] = IGNORED
    if packing == "concat":
        return Batch(tokens, labels)
    begins = torch.zeros_like(tokens, dtype=torch.bool)
    begins[:, 1:] = tokens[:, :-1] == end
    labels[begins] = IGNORED
    places = torch.arange(tokens.shape[1]).expand_as(tokens)
    starts = torch.where(begins, places, 0).cummax(1).values
    return Batch(tokens, labels, places - starts, begins.long().cumsum(1))


@torch.no_grad()
def documents_are_apart(model: Any, vocabulary: int) -> bool:  # noqa: ANN401
    """Whether a model really keeps packed documents apart: one that changes must leave the next one's logits alone.

    Asked of the model itself, since classes differ in how they make their masks: a probe of two documents of 8 tokens.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (2, 16), generator=generator)
    tokens[1, 8:] = tokens[0, 8:]
    positions = torch.arange(8).repeat(2).expand(2, 16)
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        logits = model(**Batch(tokens, tokens, positions, positions).to(device).inputs()).logits
    finally:
        model.train(training)
    # Not bit by bit: the rows of one batch may be summed in different orders.
    return bool(torch.allclose(logits[0, 8:].float(), logits[1, 8:].float(), rtol=1e-3, atol=1e-4))


def require_apart(model: Any, vocabulary: int) -> None:  # noqa: ANN401
    """Refuse packing by document where documents would see each other.

    Raises:
        UnsupportedModelError: they would.
    """
    if not documents_are_apart(model, vocabulary):
        raise UnsupportedModelError(
            f"{type(model).__name__} lets the documents of one row see each other",
            hint="--packing concat is what pre-training usually does",
        )
