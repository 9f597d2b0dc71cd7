"""How good is it still? Perplexity, KL and agreement on text, and which layer drifts; computed in float32."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.errors import InputError
from gqaconvert.families import Part
from gqaconvert.families.config import CONTEXT, LARGEST_SIZE, VOCABULARY
from gqaconvert.texts import read_documents, sample_path
from gqaconvert.validation.pair import Pair
from gqaconvert.validation.types import Check, LayerDrift, Quality, Settings

_LONGEST, _LOOKED_INTO, _LOOKED_LENGTH = 2048, 4, 256


def measure(pair: Pair, source: Any, model: Any, settings: Settings) -> Quality:  # noqa: ANN401
    """Run both models over the text.

    Raises:
        InputError: no tokenizer, or too little text.
    """
    windows = _windows(pair, pair.source_folder, settings)
    loss = source_loss = divergence = 0.0
    agreed = count = 0
    with torch.no_grad():
        for window in windows:
            before = functional.log_softmax(source(window, use_cache=False).logits[0, :-1], dim=-1)
            after = functional.log_softmax(model(window, use_cache=False).logits[0, :-1], dim=-1)
            following = window[0, 1:]
            source_loss -= float(before.gather(1, following[:, None]).sum(dtype=torch.float64))
            loss -= float(after.gather(1, following[:, None]).sum(dtype=torch.float64))
            divergence += float((before.exp() * (before - after)).sum(dtype=torch.float64))
            agreed += int((before.argmax(dim=-1) == after.argmax(dim=-1)).sum())
            count += len(following)
        layers = _drift(source, model, [window[:, :_LOOKED_LENGTH] for window in windows[:_LOOKED_INTO]])
    return Quality(
        count, windows[0].shape[1], math.exp(min(source_loss / count, 700)), math.exp(min(loss / count, 700)),
        divergence / count, agreed / count, layers,
    )  # fmt: skip


def activations(pair: Pair, settings: Settings) -> int:
    """Bytes, roughly, that running both models over a window takes beside their weights.

    Log-probabilities of all places four times over; and of the windows that are looked into, the attention of all
    heads and the residual stream of all layers, of both models.
    """
    length = min(window_length(pair), settings.max_tokens)
    vocabulary = pair.source.config.count(VOCABULARY, LARGEST_SIZE) or 0
    heads = pair.source.sites[0].geometry.num_attention_heads
    layers, looked = len(pair.source.sites), min(length, _LOOKED_LENGTH)
    output = pair.source.sites[0].find(Part.OUTPUT)
    assert output is not None
    scores = 3 * heads * length * length  # of one layer: eager attention has them, a mask, and the probabilities
    return 4 * max(4 * length * vocabulary + scores, 2 * layers * looked * (heads * looked + output.shape[0]))


def window_length(pair: Pair) -> int:
    """Tokens of a window."""
    return min(pair.source.config.count(CONTEXT, LARGEST_SIZE) or _LONGEST, _LONGEST)


def _windows(pair: Pair, folder: LocalFolder, settings: Settings) -> list[Tensor]:
    from transformers import AutoTokenizer

    name = settings.text or str(sample_path("heldout"))
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder.root, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"{folder.root}: its tokenizer cannot be loaded: {' '.join(str(error).split())[:200]}",
            hint="--level logits needs none",
        ) from error
    length = window_length(pair)
    tokens: list[int] = []
    for document in read_documents(name):
        tokens += tokenizer(document, verbose=False)["input_ids"]
        if len(tokens) >= settings.max_tokens:
            break
    tokens = tokens[: settings.max_tokens]
    if len(tokens) < 2:
        raise InputError(f"{name}: too little text")
    vocabulary = pair.source.config.count(VOCABULARY, LARGEST_SIZE)
    if vocabulary is not None and max(tokens) >= vocabulary:
        raise InputError(f"the tokenizer gives ids up to {max(tokens)}, the model's vocabulary has {vocabulary}")
    return [part[None] for part in torch.split(torch.tensor(tokens), length) if len(part) > 1]


def _drift(source: Any, model: Any, windows: list[Tensor]) -> tuple[LayerDrift, ...]:  # noqa: ANN401
    """Per layer; the stock classes give the last layer's stream after the final norm."""
    sums: list[list[float]] = []
    for window in windows:
        before = source(window, use_cache=False, output_hidden_states=True, output_attentions=True)
        after = model(window, use_cache=False, output_hidden_states=True, output_attentions=True)
        streams = list(zip(before.hidden_states[1:], after.hidden_states[1:], strict=True))
        sums = sums or [[0.0] * 4 for _ in streams]
        for number, (left, right) in enumerate(streams):
            sums[number][0] += float((right - left).square().sum())
            sums[number][1] += float(left.square().sum())
            for place, attentions in ((2, before.attentions), (3, after.attentions)):
                found = attentions[number] if attentions and number < len(attentions) else None
                sums[number][place] += math.nan if found is None else float(torch.special.entr(found).sum(-1).mean())
    return tuple(
        LayerDrift(
            number,
            math.sqrt(off / max(norm, 1e-30)),
            None if math.isnan(left) else left / len(windows),
            None if math.isnan(right) else right / len(windows),
        )
        for number, (off, norm, left, right) in enumerate(sums)
    )


def judge(quality: Quality, settings: Settings, seconds: float) -> list[Check]:
    """Thresholds, where there are any; ``seconds`` is what the measurement took."""
    limits = (
        ("quality.perplexity", quality.ratio, settings.max_ppl_ratio, "times the source's", False,
         f"perplexity {quality.source_perplexity:.2f} -> {quality.perplexity:.2f}"),
        ("quality.kl", quality.kl, settings.max_kl, "nats a token", False, "KL(source || converted)"),
        ("quality.top1", quality.top1, settings.min_top1, "of tokens", True, "same next token"),
    )  # fmt: skip
    checks = []
    for name, value, limit, unit, at_least, label in limits:
        message = f"{label}: {value:.3f} {unit}"
        if not math.isfinite(value):
            checks.append(Check(name, "failed", f"{label}: not a finite number", (), {"value": value}, seconds))
            seconds = 0.0
            continue
        if limit is None:
            checks.append(Check(name, "passed", f"{message} (no threshold)", (), {"value": value}, seconds))
            seconds = 0.0
            continue
        good = value >= limit if at_least else value <= limit
        message += f", {'at least' if at_least else 'at most'} {limit:g} wanted"
        figures = {"value": value, "limit": limit}
        checks.append(Check(name, "passed" if good else "failed", message, (), figures, seconds))
        seconds = 0.0
    return checks
