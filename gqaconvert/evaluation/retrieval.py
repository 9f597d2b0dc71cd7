"""Passkey and needle: something is hidden in a long context, and asked for afterwards."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gqaconvert.errors import InputError
from gqaconvert.evaluation.subject import Subject
from gqaconvert.policies.apply import apply_policy, make_cache
from gqaconvert.policies.cache import held_bytes, measured_peak
from gqaconvert.policies.spec import KVPolicy

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_DIGITS = 5
_FILLER = "The road goes on. The river runs beside it. The hills are far away. Nothing else happens here. "
_PASSKEY = "The pass key is {key}. Remember it: {key} is the pass key. "
_NEEDLE = "The number of the old library in Aldmoor is {key}. Note it: {key} is the library's number. "
_QUESTIONS = {
    "passkey": "\nWhat is the pass key? The pass key is",
    "needle": "\nWhat is the number of the old library in Aldmoor? The number of the old library in Aldmoor is",
}
ANSWER_TOKENS = 10
"""That the model may write: tokenizers that take digits singly need five, and a blank."""


@dataclass(frozen=True)
class Prompt:
    """One hidden number.

    Attributes:
        context: token ids.
        question: token ids.
        key: the digits.
        depth: where it is hidden, 0 to 1.
    """

    context: tuple[int, ...]
    question: tuple[int, ...]
    key: str
    depth: float


def question_tokens(subject: Subject, task: str) -> int:
    """How long the question and the answer are."""
    return len(_ids(subject.tokenizer(), _QUESTIONS[task])) + ANSWER_TOKENS


def prompts(subject: Subject, task: str, length: int, count: int, text: str | None, seed: int) -> list[Prompt]:
    """``count`` prompts at each depth, whose contexts have exactly ``length`` tokens.

    Raises:
        InputError: no tokenizer, the context is too short for what is hidden, or too little text.
    """
    tokenizer = subject.tokenizer()
    generator = random.Random(seed)  # noqa: S311
    pattern = _PASSKEY if task == "passkey" else _NEEDLE
    question = tuple(_ids(tokenizer, _QUESTIONS[task]))
    found = []
    for depth in DEPTHS:
        for number in range(count):
            key = str(generator.randrange(10 ** (_DIGITS - 1), 10**_DIGITS))
            hidden = _ids(tokenizer, pattern.format(key=key))
            room = length - len(hidden) - 1
            if room < len(hidden):
                raise InputError(f"a context of {length} tokens has no place to hide {len(hidden)}", hint="--lengths")
            first = tokenizer("", verbose=False)["input_ids"][:1]
            if task == "passkey":
                hay = _ids(tokenizer, _FILLER)
                hay = (hay * (room // len(hay) + 1))[: room + 1 - len(first)]
            else:
                start = number * room
                hay = subject.tokens(text, start + room + 1)[start:][: room + 1 - len(first)]
                if len(hay) < room + 1 - len(first):
                    raise InputError(f"the text is too short for {count} contexts of {length} tokens", hint="--text")
            place = round(depth * len(hay))
            found.append(Prompt((*first, *hay[:place], *hidden, *hay[place:]), question, key, depth))
    return found


def _ids(tokenizer: Any, text: str) -> list[int]:  # noqa: ANN401
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


@torch.no_grad()
def policy_accuracy(
    subject: Subject, asked: list[Prompt], policy: KVPolicy, chunk: int, *, known: bool, advance: Callable[[int], None]
) -> tuple[float, int, int, float, tuple[str, ...]]:
    """(part of right answers, bytes held, peak bytes, tokens a second, the answers); the prompts side by side.

    The context is read ``chunk`` tokens at once (0: all), and evicted. Unless ``known``, the question comes only then,
    as a user's does; else it is read with the context's end, so that policies that look at the newest token can keep
    what it needs.
    """
    tokenizer = subject.tokenizer()
    contexts = torch.tensor([prompt.context for prompt in asked], device=subject.device)
    questions = torch.tensor([prompt.question for prompt in asked], device=subject.device)
    if known:
        contexts, questions = torch.cat([contexts, questions[:, :-1]], dim=1), questions[:, -1:]
    cache = make_cache(subject.model, policy)
    written: list[torch.Tensor] = []
    begun = time.monotonic()
    with measured_peak(cache) as peak, apply_policy(subject.model, policy):
        for part in torch.split(contexts, chunk or contexts.shape[1], dim=1):
            subject.model(part, cache=cache, use_cache=True, logits_to_keep=1)
            advance(part.numel())
        step = questions
        for _ in range(ANSWER_TOKENS):
            logits = subject.model(step, cache=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
            step = logits.argmax(dim=-1, keepdim=True)
            written.append(step)
            advance(len(step))
    seconds = time.monotonic() - begun
    answers = tuple(tokenizer.batch_decode(torch.cat(written, dim=1)))
    right = sum(prompt.key in "".join(answer.split()) for prompt, answer in zip(asked, answers, strict=True))
    tokens = contexts.numel() + questions.numel() + sum(step.numel() for step in written)
    shown = tuple(f"{prompt.key} at {prompt.depth:.0%}:{answer}" for prompt, answer in zip(asked, answers, strict=True))
    size = len(asked)
    return right / size, held_bytes(cache) // size, peak.nbytes // size, tokens / seconds, shown
