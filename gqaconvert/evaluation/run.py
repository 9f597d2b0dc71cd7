"""``evaluate``: models, a task, policies and budgets -> figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import torch

from gqaconvert.errors import InputError
from gqaconvert.evaluation.budgets import parse_budgets, policies
from gqaconvert.evaluation.generation import generate
from gqaconvert.evaluation.norms import layer_norms
from gqaconvert.evaluation.perplexity import policy_perplexity
from gqaconvert.evaluation.probe import probe_layers
from gqaconvert.evaluation.retrieval import DEPTHS, policy_accuracy, prompts, question_tokens
from gqaconvert.evaluation.subject import Subject, lengths_of, open_subject
from gqaconvert.evaluation.types import (
    TASKS,
    EvaluateOptions,
    Evaluation,
    LayerNorms,
    LayerProbe,
    PolicyRow,
)
from gqaconvert.policies.apply import apply_policy
from gqaconvert.policies.spec import KVPolicy

Advance = Callable[[int], None]


def evaluate(
    models: tuple[str, ...],
    options: EvaluateOptions | None = None,
    *,
    revision: str | None = None,
    offline: bool = False,
    on_total: Callable[[int], None] = lambda total: None,
    advance: Advance = lambda tokens: None,
    on_row: Callable[[PolicyRow], None] = lambda row: None,
) -> Evaluation:
    """Measure models, one after the other.

    Args:
        models: folders or Hub ids; the first is the one that others are compared with.
        options: what to measure.
        revision: of the first, if it is a Hub id.
        offline: use only what is in the Hub client's cache.
        on_total: called with the tokens that a model will be run on.
        advance: called with the number of tokens that were just run.
        on_row: called with each policy's figures.

    Raises:
        GqaConvertError: bad options, or a model that cannot be measured so.
    """
    options = options or EvaluateOptions()
    _check(options)
    chunk = (1 if options.task == "perplexity" else 0) if options.chunk is None else options.chunk
    rows: list[PolicyRow] = []
    norms: list[LayerNorms] = []
    probes: list[LayerProbe] = []
    baseline: dict[str, float] = {}
    notes: list[str] = ["models were run in float32, whatever type their weights are stored in"]
    for number, name in enumerate(models):
        subject = open_subject(
            name, revision=revision if number == 0 else None, offline=offline,
            trust_remote_code=options.trust_remote_code,
        )  # fmt: skip
        try:
            if options.task == "alr":
                norms += _norms(subject, options, on_total, advance)
            elif options.task == "probe":
                baseline[name], found = _probe(subject, options, on_total, advance)
                probes += found
            else:
                for row in _rows(subject, options, chunk, on_total, advance):
                    rows.append(row)
                    on_row(row)
                notes += _left_alone(subject, options)
        finally:
            del subject
    advice = [*_advice_on_norms(norms), *_advice_on_probes(probes)]
    if options.task in ("passkey", "needle") and options.question == "later":
        notes.append("the question comes after the eviction, as a user's does; --question known reads it before")
    return Evaluation(
        options, models, chunk, tuple(rows), tuple(norms), tuple(probes), baseline, tuple(advice),
        tuple(dict.fromkeys(notes)),
    )  # fmt: skip


def _check(options: EvaluateOptions) -> None:
    if options.task not in TASKS:
        raise InputError(f"no task {options.task!r}", hint=f"known: {', '.join(TASKS)}")
    if options.question not in ("later", "known"):
        raise InputError(f"--question {options.question}: later or known")
    for name, value, least in (
        ("windows", options.windows, 1), ("new-tokens", options.new_tokens, 1), ("kv-heads", options.kv_heads, 1),
        ("chunk", options.chunk or 0, 0),
    ):  # fmt: skip
        if value < least:
            raise InputError(f"--{name} {value}: at least {least}")
    parse_budgets(options.budgets)
    for _ in policies(options.policies, options.budgets, 64):
        pass


def _rows(
    subject: Subject, options: EvaluateOptions, chunk: int, on_total: Callable[[int], None], advance: Advance
) -> Iterator[PolicyRow]:
    task = options.task
    reserve = {"generate": options.new_tokens, "perplexity": 0}.get(task)
    reserve = question_tokens(subject, task) if reserve is None else reserve
    lengths = lengths_of(subject, options.lengths, reserve)
    planned = [(length, list(policies(options.policies, options.budgets, length + reserve))) for length in lengths]
    count = len(DEPTHS) * options.windows if task in ("passkey", "needle") else options.windows
    on_total(sum(length * count * len(chosen) for length, chosen in planned))
    for length, chosen in planned:
        measure = _measure(subject, options, chunk, length, advance)
        for budget, policy in chosen:
            yield PolicyRow(subject.name, str(policy), budget, length, *measure(policy))


Figures = tuple[float, int, int, float, tuple[str, ...]]


def _measure(
    subject: Subject, options: EvaluateOptions, chunk: int, length: int, advance: Advance
) -> Callable[[KVPolicy], Figures]:
    """(value, bytes held, peak bytes, tokens a second, examples) by policy; the full cache has to come first."""
    if options.task in ("passkey", "needle"):
        asked = prompts(subject, options.task, length, options.windows, options.text, options.seed)
        known = options.question == "known"
        return lambda policy: policy_accuracy(subject, asked, policy, chunk, known=known, advance=advance)
    windows = subject.windows(options.text, options.windows, length)
    if options.task == "perplexity":
        return lambda policy: (*policy_perplexity(subject, windows, policy, chunk, advance), ())
    references: list[torch.Tensor] = []

    def same(policy: KVPolicy) -> Figures:
        new, held, peak, speed = generate(subject, windows, policy, chunk, options.new_tokens)
        references.append(new)
        advance(windows.numel())
        texts = tuple(subject.tokenizer().batch_decode(new))
        return float((new == references[0]).double().mean()), held, peak, speed, texts

    return same


def _left_alone(subject: Subject, options: EvaluateOptions) -> Iterator[str]:
    for _, policy in list(policies(options.policies, options.budgets, 64))[1:]:
        with apply_policy(subject.model, policy.at(Fraction(1))) as applied:
            reasons = sorted(set(applied.left_alone.values()) - {"skipped"})
        if reasons:
            yield f"{subject.name}: layers that keep what they have: {', '.join(reasons)}"


def _norms(
    subject: Subject, options: EvaluateOptions, on_total: Callable[[int], None], advance: Advance
) -> list[LayerNorms]:
    (length,) = lengths_of(subject, options.lengths[:1])
    windows = subject.windows(options.text, options.windows, length)
    on_total(windows.numel())
    return layer_norms(subject, windows, advance)


def _probe(
    subject: Subject, options: EvaluateOptions, on_total: Callable[[int], None], advance: Advance
) -> tuple[float, list[LayerProbe]]:
    (length,) = lengths_of(subject, options.lengths[:1] or (min(subject.context, 256),))
    windows = subject.windows(options.text, max(2, options.windows), length)
    layers = len(subject.checkpoint.require_sites())
    on_total(windows.numel() + 2 * layers * (windows.numel() - windows.numel() // 2))
    return probe_layers(subject, windows, options.kv_heads, advance)


def _advice_on_norms(norms: list[LayerNorms]) -> Iterator[str]:
    for name in dict.fromkeys(found.model for found in norms):
        layers = [found for found in norms if found.model == name]
        mean = sum(found.mean for found in layers) / len(layers)
        chance = [found.layer for found in layers if found.mean >= 1]
        poor = sorted(layers, key=lambda found: -found.mean)[:3]
        told = f"{name}: mean ALR {mean:.2f} of chance; worst in layers "
        told += ", ".join(f"{found.layer} ({found.mean:.2f})" for found in poor)
        if chance:
            skip = ",".join(map(str, chance))
            told += f"; norms say nothing in layers {skip}: l2 should leave them alone (l2:1/2:skip={skip})"
        else:
            told += "; in every layer norms are better than chance"
        yield told


def _advice_on_probes(probes: list[LayerProbe]) -> Iterator[str]:
    for name in dict.fromkeys(found.model for found in probes):
        layers = sorted((found for found in probes if found.model == name), key=lambda found: found.pooled)
        easy = ", ".join(str(found.layer) for found in layers[:3])
        hard = ", ".join(str(found.layer) for found in layers[-3:][::-1])
        yield (
            f"{name}: fewer KV heads cost least in layers {easy} and most in {hard}. Advice only: stock classes take "
            "one number of KV heads for all layers"
        )
