"""Tiny jobs, and running a backend in processes of its own that can be killed."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gqaconvert.errors import GqaConvertError
from gqaconvert.uptrain.data import prepare
from gqaconvert.uptrain.job import Job, Outcome
from gqaconvert.uptrain.trainers import run_job

VOCABULARY, SEQ_LEN = 96, 16
FORKS = multiprocessing.get_context("fork")  # the imports of transformers cost seconds, and are made


def tiny_llama(folder: Path, *, kv_heads: int = 4, seed: int = 0, tied: bool = False) -> Path:
    """A random model that learns something in a few steps."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=kv_heads, max_position_embeddings=64, bos_token_id=None, eos_token_id=0, pad_token_id=None,
        tie_word_embeddings=tied,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def token_folder(model: Path, place: Path, *, windows: int = 40, seed: int = 0) -> Path:
    """Tokens with something to learn: each mostly follows from the one before."""
    generator = np.random.default_rng(seed)
    tokens = [1]
    for _ in range(windows * SEQ_LEN - 1):
        tokens.append(
            int(generator.integers(VOCABULARY)) if generator.random() < 0.2 else (7 * tokens[-1] + 3) % VOCABULARY
        )
    np.save(place / f"tokens-{seed}.npy", np.array(tokens))
    return prepare((str(place / f"tokens-{seed}.npy"),), model, place / "cache", seq_len=SEQ_LEN).folder


def make_job(folder: Path, model: Path, tokens: Path, name: str, **changes: Any) -> Job:  # noqa: ANN401
    """A job of 8 steps of 8 windows; the working folder exists."""
    job = Job(
        trainer="torch", model=str(model), run=str(folder / name), tokens=str(tokens), eval_tokens=None, eval_windows=4, seq_len=SEQ_LEN,
        teacher=None, steps=8, batch_size=8, micro_batch=4, learning_rate=3e-3, checkpoint_every=3, threads=1,
    )  # fmt: skip
    job = replace(job, **changes)
    job.folder.mkdir(parents=True, exist_ok=True)
    return job


def run(job: Job) -> Outcome:
    """Run a job here, to its end."""
    return run_job(job, lambda record: None)


def records(job: Job) -> list[dict[str, Any]]:
    """The metrics, without what the clock says."""
    found = [json.loads(line) for line in job.metrics.read_text().splitlines()]
    return [{name: value for name, value in record.items() if "second" not in name} for record in found]


def losses(job: Job) -> list[float]:
    """Of the steps."""
    return [record["loss"] for record in records(job) if "loss" in record]


def weights(job: Job) -> dict[str, Tensor]:
    """What the run left."""
    return load_file(job.trained / "model.safetensors")


def same_weights(one: Job, other: Job) -> bool:
    """Bit by bit."""
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def in_process(target: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
    """Start a function in a forked process."""
    process = FORKS.Process(target=target, args=arguments)
    process.start()
    return process


def run_until(job: Job, step: int, number: int, also: Callable[[Mapping[str, Any]], None] | None = None) -> None:
    """In a forked process: send itself a signal when a step has been written to the metrics."""

    def on_event(record: Mapping[str, Any]) -> None:
        if also:
            also(record)
        if record["step"] == step and "loss" in record:
            os.kill(os.getpid(), number)

    try:
        run_job(job, on_event)
    except KeyboardInterrupt:
        os._exit(130)
    except GqaConvertError as error:
        os._exit(100 + error.exit_code)
    os._exit(0)


def ended(process: Any) -> int:  # noqa: ANN401
    """Exit code of a process that must end."""
    process.join(120)
    assert process.exitcode is not None
    return int(process.exitcode)


def interrupt(job: Job, step: int, number: int = signal.SIGKILL) -> int:
    """Exit code of a run that gets a signal after a step."""
    return ended(in_process(run_until, job, step, number))
