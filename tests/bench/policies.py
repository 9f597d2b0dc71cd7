"""What cache policies cost on trained models: perplexity token by token, at parts of the context, and memory.

    python -m tests.bench.policies example     # the example model, windows of 256 tokens: 3 to 5 minutes on one core
    python -m tests.bench.policies smollm2     # SmolLM2-135M, windows of 512: an hour, 2 minutes a policy and part
    python -m tests.bench.policies FOLDER      # any checkpoint
    python -m tests.bench.policies memory      # prefill of 4,000 tokens: peak of the process, by policy

Protocol. The first windows of examples/heldout.txt, each on its own, fed one token at a time through the cache; the
perplexity is over all tokens but each window's first, in float32 from the stored files. TOVA, window and H2O hold a
part of the window's length as a fixed number of entries, as in the TOVA paper's table 3. The L2 policy and its controls
keep that part of the tokens seen, in all layers but 0 and 1, as in the L2 paper: they hold more (the column says how
much), so they are compared with each other.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from gqaconvert.policies.apply import apply_policy, make_cache
from gqaconvert.policies.cache import held_bytes
from gqaconvert.policies.spec import KVPolicy
from tests.policies.test_composition import PREFILL, STEADY
from tests.support.smollm2 import smollm2_checkpoint

EXAMPLES = Path(__file__).parents[2] / "examples"
PARTS = (Fraction(1, 4), Fraction(1, 8), Fraction(1, 2))
BY_BUDGET = ("tova", "window+sinks", "window", "h2o", "tova-head", "random:sinks=4")
BY_RATIO = ("l2", "random:skip=0,1", "l2-high", "l2:skip=")


@torch.no_grad()
def perplexity(model: Any, windows: Tensor, policy: KVPolicy, chunk: int = 1) -> tuple[float, int]:  # noqa: ANN401
    """Of (B, T) tokens, ``chunk`` at a time; and the bytes of keys and values that are left."""
    cache = make_cache(model, policy)
    total = 0.0
    with apply_policy(model, policy):
        for start in range(0, windows.shape[1] - 1, chunk):
            part = windows[:, start : min(start + chunk, windows.shape[1] - 1)]
            logits = model(part, cache=cache, use_cache=True).logits.flatten(0, 1)
            targets = windows[:, start + 1 : start + 1 + part.shape[1]].flatten()
            total += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
    return math.exp(total / windows[:, 1:].numel()), held_bytes(cache)


def policies(length: int, names: Sequence[str]) -> Iterator[tuple[Fraction, KVPolicy]]:
    """What is measured, the full cache first."""
    yield Fraction(1), KVPolicy("full")
    for part in PARTS:
        for text in names:
            yield part, KVPolicy.parse(text, part if text in BY_RATIO else int(part * length))


def quality(folder: Path, length: int, count: int, names: Sequence[str]) -> None:
    """One line of JSON a policy."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    text = (EXAMPLES / "heldout.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(folder)(text, verbose=False)["input_ids"]
    windows = torch.tensor(ids[: length * count]).view(count, length)
    full = 0
    for part, policy in policies(length, names):
        start = time.perf_counter()
        value, nbytes = perplexity(model, windows, policy)
        full = full or nbytes
        row = {"part": str(part), "policy": str(policy), "perplexity": round(value, 3),
               "cache": round(nbytes / full, 4), "seconds": round(time.perf_counter() - start, 1)}  # fmt: skip
        print(json.dumps(row), flush=True)


def memory() -> None:
    """The peak of a fresh process, in MiB above what the stock prefill needs."""
    names = ("tova:500", "tova-head:500", "l2:500:skip=", "window:500", "h2o:500", "random:500")
    for name in names:
        command = [sys.executable, "-c", PREFILL, "full", name]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | STEADY)
        stock, peak = (int(number) / 1024 for number in ended.stdout.split())
        print(json.dumps({"policy": name, "stock MiB": round(stock, 1), "more": round(peak - stock, 1)}), flush=True)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("what")
    parser.add_argument("--length", type=int)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--policies", nargs="*", default=[*BY_BUDGET, *BY_RATIO])
    given = parser.parse_args()
    if given.what == "memory":
        memory()
        return
    places = {"example": EXAMPLES / "tiny-llama"}
    folder = smollm2_checkpoint() if given.what == "smollm2" else places.get(given.what, Path(given.what))
    quality(folder, given.length or (256 if given.what == "example" else 512), given.windows, given.policies)


if __name__ == "__main__":
    main()
