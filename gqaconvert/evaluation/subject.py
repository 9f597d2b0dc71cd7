"""A model that is evaluated, with its tokenizer and its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gqaconvert.checkpoint.source import fetch_source
from gqaconvert.errors import InputError, UnsupportedModelError
from gqaconvert.families.config import CONTEXT, LARGEST_SIZE
from gqaconvert.inspection import Checkpoint, read_checkpoint
from gqaconvert.memory import require_memory
from gqaconvert.stock import load_stock
from gqaconvert.texts import load_tokenizer, read_documents, sample_path

_LONGEST = 512


@dataclass(frozen=True)
class Subject:
    """A model in float32 on the device that computes.

    Attributes:
        name: as the user called it.
        checkpoint: its files.
        model: the stock class.
        device: where it is.
    """

    name: str
    checkpoint: Checkpoint
    model: Any
    device: torch.device

    @property
    def context(self) -> int:
        """Tokens that the model is made for."""
        return self.checkpoint.config.count(CONTEXT, LARGEST_SIZE) or 2**20

    def tokenizer(self) -> Any:  # noqa: ANN401
        """Of its folder.

        Raises:
            InputError: there is none.
        """
        return load_tokenizer(self.checkpoint.files.root)  # type: ignore[attr-defined]

    def windows(self, text: str | None, count: int, length: int) -> Tensor:
        """The first ``count`` windows of a text, (count, length) int64, on the model's device.

        Raises:
            InputError: too little text, or a tokenizer that is not the model's.
        """
        tokens = self.tokens(text, count * length)
        if len(tokens) < count * length:
            raise InputError(
                f"{text or 'the packaged text'} has {len(tokens):,} tokens, {count} windows of {length:,} need "
                f"{count * length:,}",
                hint="fewer --windows, shorter --lengths, or more text",
            )
        return torch.tensor(tokens).view(count, length).to(self.device)

    def tokens(self, text: str | None, count: int) -> list[int]:
        """At most ``count`` tokens of a text."""
        tokenizer = self.tokenizer()
        found: list[int] = []
        for document in read_documents(text or str(sample_path("heldout"))):
            found += tokenizer(document, verbose=False)["input_ids"]
            if len(found) >= count:
                break
        found = found[:count]
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if found and max(found) >= vocabulary:
            raise InputError(f"{self.name}: the tokenizer gives ids up to {max(found)}, the model has {vocabulary}")
        return found


def open_subject(
    name: str, *, revision: str | None = None, offline: bool = False, trust_remote_code: bool = False
) -> Subject:
    """Load a model for evaluation.

    Raises:
        GqaConvertError: it is not there, not sound, no decoder, or does not fit into memory.
    """
    folder = fetch_source(name, revision=revision, offline=offline)
    checkpoint = read_checkpoint(folder)
    checkpoint.require_sound()
    if checkpoint.config.raw.get("is_encoder_decoder"):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; policies and probes are for decoders")
    needed = 4 * sum(entry.numel for entry in checkpoint.index.entries.values())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    require_memory(needed, f"{name} in float32", hint="a smaller model, or a machine with more memory")
    model, faults = load_stock(folder, trust_remote_code=trust_remote_code)
    if made_up := [fault for fault in faults if fault.startswith(("missing", "mismatched"))]:
        raise UnsupportedModelError(f"{name} does not fit its stock class: {', '.join(made_up[:3])}")
    return Subject(name, checkpoint, model.to(device), device)


def lengths_of(subject: Subject, lengths: tuple[int, ...], reserve: int = 0) -> tuple[int, ...]:
    """The lengths to measure at; by default the model's context, at most 512 tokens, less what is to follow.

    Raises:
        InputError: a length is too small, or beyond the model's context.
    """
    chosen = lengths or (min(subject.context, _LONGEST) - reserve,)
    for length in chosen:
        if length < 8 or length + reserve > subject.context:
            raise InputError(
                f"{length} tokens{f' and {reserve} more' if reserve else ''}: {subject.name} is made for 8 to "
                f"{subject.context:,}",
                hint="--lengths",
            )
    return chosen
