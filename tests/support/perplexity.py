"""Perplexity of a folder's model on a text, by stock transformers in float32."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def perplexity(folder: Path, text: str, *, window: int, windows: int) -> float:
    """exp of the mean cross-entropy a token over the first ``windows`` windows, each on its own.

    bfloat16 files are computed in float32: many CPUs have no fast bfloat16.
    """
    auto: Any = AutoModelForCausalLM  # its methods are not annotated
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = AutoTokenizer.from_pretrained(folder)(text, verbose=False)["input_ids"]
    losses = []
    for start in range(0, min(len(tokens) // window, windows) * window, window):
        batch = torch.tensor([tokens[start : start + window]])
        losses.append(float(model(input_ids=batch, labels=batch).loss))
    return math.exp(sum(losses) / len(losses))
