"""Policies beside the rest: converted models, the bytes that `estimate` says, memory, and what is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from gqaconvert.conversion import convert
from gqaconvert.families.config import ModelConfig
from gqaconvert.kvcache.dtypes import cache_dtype
from gqaconvert.kvcache.layers import CacheSettings, cache_size
from gqaconvert.kvcache.models import cache_model
from gqaconvert.policies.apply import apply_policy, make_cache
from gqaconvert.policies.cache import held_bytes, held_entries, measured_peak
from gqaconvert.policies.spec import KVPolicy
from tests.policies.models import in_chunks, kept, tiny, tokens


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A model whose eight K/V heads are equal in groups of four, and what `convert` makes of it: two heads."""
    folder = tmp_path_factory.mktemp("tied")
    model = tiny(num_key_value_heads=8)
    with torch.no_grad():
        for layer in model.model.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                heads = projection.weight.view(2, 4, 8, -1)
                heads.copy_(heads[:, :1].expand_as(heads))
    model.save_pretrained(folder / "source")
    convert(str(folder / "source"), folder / "output", 2)
    auto: Any = AutoModelForCausalLM
    source, output = (auto.from_pretrained(folder / name, dtype=torch.float32).eval() for name in ("source", "output"))
    assert output.config.num_key_value_heads == 2
    return source, output


@pytest.mark.parametrize("text", ["tova:12", "tova:0.3", "l2:12:skip=0", "l2:0.3:skip=0", "window+sinks:12"])
@pytest.mark.parametrize("chunk", [1, 8])
def test_tied_heads_evict_as_the_converted_model_does(pair: tuple[Any, Any], text: str, chunk: int) -> None:
    """Not so for tova-head and h2o: there, each head of a group used to decide by its own queries."""
    policy, ids = KVPolicy.parse(text), tokens(2, 64)
    (expected, whole), (logits, shared) = (in_chunks(model, ids, policy, chunk) for model in pair)
    for row in range(2):
        for layer in range(3):
            heads = kept(whole, layer, row)
            # All heads of a group decide alike, and the one that stands for them as they do.
            assert heads == [head for head in kept(shared, layer, row) for _ in range(4)]
    torch.testing.assert_close(logits, expected, atol=2e-6, rtol=1e-6)
    assert held_bytes(shared) * 4 == held_bytes(whole)


SIZED: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_hidden_layers": 4}),
    ("llama", {"num_key_value_heads": 8}),
    ("qwen3", {}),
    ("gemma3_text", {"num_hidden_layers": 7, "sliding_window": 6}),
    ("phi3", {"sliding_window": None}),
]
AMOUNTS = (
    "full", "tova:9", "tova:1/4", "tova-head:9", "l2:9", "l2:0.1", "l2:0.5:skip=1", "window:9", "window+sinks:9",
    "h2o:1/3", "random:9",
)  # fmt: skip


@pytest.mark.parametrize(("kind", "overrides"), SIZED, ids=[f"{n}-{row[0]}" for n, row in enumerate(SIZED)])
def test_a_cache_holds_what_is_estimated(kind: str, overrides: dict[str, Any]) -> None:
    model = tiny(kind, **overrides)
    sized = cache_model(ModelConfig.of(model.config.to_diff_dict() | {"model_type": kind}))
    number = cache_dtype("float32")
    for text in AMOUNTS:
        policy = KVPolicy.parse(text)
        for length in (5, 30):
            _, cache = in_chunks(model, tokens(2, length), policy, 3)
            settings = CacheSettings(number, number, runtime="transformers", policy=policy)
            # Stock sliding layers are slices of what they were: that much more is behind them.
            slack = sum(
                tensor.untyped_storage().nbytes() - tensor.nbytes
                for layer in cache.layers if layer.is_sliding for tensor in (layer.keys, layer.values)
            )  # fmt: skip
            assert held_bytes(cache) - slack == cache_size(sized, length, 2, settings).total
            if kind == "llama":
                assert held_entries(cache) == tuple(policy.entries(layer, length) for layer in range(len(cache.layers)))


@pytest.mark.parametrize("text", ["full", "tova:12", "l2:1/8", "h2o:12", "window:1.0"])
def test_the_peak_of_a_prefill_is_what_is_estimated(text: str) -> None:
    model, policy = tiny(num_hidden_layers=8), KVPolicy.parse(text)
    cache = make_cache(model, policy)
    with measured_peak(cache) as peak, apply_policy(model, policy), torch.no_grad():
        model(tokens(2, 96), cache=cache)
    sized = cache_model(ModelConfig.of(model.config.to_diff_dict() | {"model_type": "llama"}))
    number = cache_dtype("float32")
    assert peak.nbytes == cache_size(sized, 96, 2, CacheSettings(number, number, policy=policy)).prefill_peak


def test_what_is_evicted_is_freed() -> None:
    """The storage is as large as what is kept: no view that keeps the rest alive."""
    _, cache = in_chunks(tiny(), tokens(2, 60), KVPolicy.parse("tova:10"), 60)
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            assert isinstance(tensor, Tensor)
            assert tensor.untyped_storage().nbytes() == 2 * 2 * 10 * 8 * 4


PREFILL = """
import resource, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from gqaconvert.policies.apply import apply_policy
from gqaconvert.policies.spec import KVPolicy
config = AutoConfig.for_model(
    "llama", vocab_size=64, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=8, head_dim=16, max_position_embeddings=8192,
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
ids = torch.randint(0, 64, (1, 4000))

def peak(text):
    with torch.no_grad(), apply_policy(model, KVPolicy.parse(text)):
        model(ids, use_cache=True, logits_to_keep=1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

print(*map(peak, sys.argv[1:]))
"""
STEADY = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""glibc: blocks of tensors go back at once, so that the peak is what is alive and not how the heap is fragmented."""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit elsewhere")
def test_scoring_a_long_prompt_costs_little_memory() -> None:
    """The peak of a process after a stock prefill, and after prefills with policies: each may raise it by a little.

    Eager attention would raise it by 8 heads x 4,000 x 4,000 x 4 bytes, 488 MiB.
    """
    command = [sys.executable, "-c", PREFILL, "full", "tova:500", "h2o:500"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=os.environ | STEADY)
    stock, *peaks = (1024 * int(number) for number in ended.stdout.split())
    assert max(peaks) - stock <= 20 * 2**20, (stock, peaks)


def test_specifications_and_scores_import_no_torch() -> None:
    script = (
        "import sys, gqaconvert.policies.scores; from gqaconvert.policies.spec import KVPolicy;"
        "KVPolicy.parse('tova:512'); sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


def test_without_transformers_one_line_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('not here')")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from gqaconvert.errors import MissingExtraError\n"
        "try:\n    import gqaconvert.policies.apply\n"
        "except MissingExtraError as error:\n    print(error.hint)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout.strip() == "pip install 'gqaconvert[transformers]'"
