"""What a trainer backend is told, what it tells back, and what it has to offer. No torch."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

Loss = Literal["lm", "distill", "mixed"]
Trainable = Literal["all", "attention", "kv"]
Precision = Literal["float32", "bfloat16"]

LOSSES: tuple[Loss, ...] = ("lm", "distill", "mixed")
TRAINABLE: tuple[Trainable, ...] = ("all", "attention", "kv")
PRECISIONS: tuple[Precision, ...] = ("float32", "bfloat16")


@dataclass(frozen=True)
class Job:
    """A run, down to every number that decides its weights. Written to ``job.json``; all ranks read that file.

    Attributes:
        trainer: name of the backend.
        model: folder of the converted checkpoint.
        run: working folder: data, checkpoints, metrics.
        tokens: folder of the tokenised training text.
        eval_tokens: folder of the tokenised held-out text, None to hold out windows of the training text.
        eval_windows: windows of held-out text, 0 for no evaluation.
        seq_len: tokens a window.
        packing: "concat" or "document".
        teacher: folder of the unconverted checkpoint, None for loss "lm".
        steps: of the optimiser.
        batch_size: sequences in a step, over all processes.
        micro_batch: sequences that one process runs at a time.
        learning_rate: peak.
        warmup: part of the steps in which it rises; the first step's is above zero.
        decay: part of the steps, at the end, in which it falls linearly to zero.
        weight_decay: of AdamW, on matrices only.
        clip: largest norm of the gradient.
        loss: "lm" (next token), "distill" (KL against the teacher's distribution), "mixed" (half of each).
        trainable: "all", "attention" or "kv" (key and value projections, and their norms).
        precision: of the computation; weights and optimiser state are float32.
        checkpoint_activations: compute activations again in the backward pass instead of keeping them.
        optimizer: "adamw", or "adamw8bit" (package bitsandbytes).
        seed: decides the order of the text.
        checkpoint_every: steps between checkpoints.
        keep: checkpoints that stay.
        eval_every: steps between evaluations, 0 for before and after only.
        max_seconds: stop with a checkpoint after so long, None for never.
        nproc: processes on this machine.
        threads: of torch in each process, 0 to leave it alone. Bit-identical resumption needs the same number.
        flops_per_token: of training the model, for the MFU; None if it is not known.
        report_to: trackers besides metrics.jsonl: "tensorboard", "wandb", "trackio".
        backend_options: passed to the backend as they are.
    """

    trainer: str
    model: str
    run: str
    tokens: str
    eval_tokens: str | None
    eval_windows: int
    seq_len: int
    teacher: str | None
    steps: int
    batch_size: int
    micro_batch: int
    learning_rate: float
    packing: str = "concat"
    warmup: float = 0.05
    decay: float = 0.5
    weight_decay: float = 0.0
    clip: float = 1.0
    loss: Loss = "lm"
    trainable: Trainable = "all"
    precision: Precision = "float32"
    checkpoint_activations: bool = False
    optimizer: str = "adamw"
    seed: int = 0
    checkpoint_every: int = 100
    keep: int = 2
    eval_every: int = 0
    max_seconds: float | None = None
    nproc: int = 1
    threads: int = 0
    flops_per_token: int | None = None
    report_to: tuple[str, ...] = ()
    backend_options: Mapping[str, Any] = field(default_factory=dict)

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Job":
        """Read what `save` wrote."""
        fields = json.loads(path.read_text())
        return cls(**{**fields, "report_to": tuple(fields["report_to"])})

    @property
    def folder(self) -> Path:
        """The working folder."""
        return Path(self.run)

    @property
    def metrics(self) -> Path:
        """One JSON object a line: steps, evaluations, events."""
        return self.folder / "metrics.jsonl"

    @property
    def trained(self) -> Path:
        """Where the backend leaves the weights: ``model.safetensors`` with the model's parameters in float32."""
        return self.folder / "trained"


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do; asked before anything starts.

    Attributes:
        losses: that it knows.
        trainable: sets of parameters that it can restrict itself to.
        processes: whether it runs in more than one.
        exact_resume: whether an interrupted run ends bit-identical to an uninterrupted one, on one machine.
        encoder_decoder: whether it trains models like T5.
    """

    losses: tuple[Loss, ...]
    trainable: tuple[Trainable, ...]
    processes: bool
    exact_resume: bool
    encoder_decoder: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a backend's run ended.

    Attributes:
        finished: all steps were taken, and `Job.trained` holds the weights; else it stopped for want of time, with
            a checkpoint.
        steps: taken, those before a resumption included.
        first_loss: of the first step.
        last_loss: mean of the last tenth of the steps.
        eval_before: mean loss on held-out text in nats a token before the first step, None without such text.
        eval_after: the same after the last.
        spikes: steps whose loss stood out from those before.
    """

    finished: bool
    steps: int
    first_loss: float | None
    last_loss: float | None
    eval_before: float | None
    eval_after: float | None
    spikes: tuple[int, ...] = ()


OnEvent = Callable[[Mapping[str, Any]], None]
"""Called with each line of metrics.jsonl as it is written."""


class Trainer(Protocol):
    """A backend: registered as a class under a name in the entry-point group ``gqaconvert.trainers``.

    It may also have ``notes(job) -> list[str]``: what a user should know of how this job will run.
    """

    name: str

    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    def check(self, job: Job) -> list[str]:
        """What would go wrong with this job, without side effects; empty if nothing."""
        ...

    def launch(self, job: Job) -> list[str] | None:
        """None to run in this process, or a launcher to which ``-m MODULE JOB`` is added (``torchrun ...``)."""
        ...

    def run(self, job: Job, on_event: OnEvent) -> Outcome:
        """Train, in each process, from the last complete checkpoint of ``job.run`` if there is one.

        Raises:
            GqaConvertError: known failures.
            KeyboardInterrupt: on SIGINT and SIGTERM, after a checkpoint.
        """
        ...
