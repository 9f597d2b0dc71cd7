"""The loop of the backend ``torch``: one process, or one of several that shard the model among them (FSDP2).

Nothing of the past is needed but weights and optimiser: the rows of a step, its learning rate and its random numbers
are functions of the job and the step. So a checkpoint (torch.distributed.checkpoint) of any number of processes
continues on any other.
"""

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gqaconvert.errors import StorageError
from gqaconvert.kvcache.costs import GPUS
from gqaconvert.stock import quiet
from gqaconvert.uptrain import is_launched
from gqaconvert.uptrain.checkpoints import (
    checkpoint_folder,
    last_complete,
    record_complete,
    replace_folder,
    rotate,
    step_of,
    storing,
)
from gqaconvert.uptrain.data import open_parts
from gqaconvert.uptrain.job import Job, OnEvent, Outcome
from gqaconvert.uptrain.loss import cross_entropy, loss_sums, model_inputs
from gqaconvert.uptrain.metrics import MetricsLog, require_finite
from gqaconvert.uptrain.models import load_teacher, make_optimizer, prepare_model
from gqaconvert.uptrain.packing import IGNORED, Batch
from gqaconvert.uptrain.processes import Stopper, catch_signals, join
from gqaconvert.uptrain.schedule import learning_rate
from gqaconvert.uptrain.trackers import Trackers

CHECKPOINTS = "checkpoints"
_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


@dataclass(frozen=True)
class World:
    """This process among all.

    Attributes:
        rank: its number.
        size: how many there are.
        device: where it computes.
    """

    rank: int
    size: int
    device: torch.device

    @property
    def main(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """Sums over all processes, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def any(self, value: bool) -> bool:
        """Whether it is true in some process."""
        return bool(self._reduce((float(value),), dist.ReduceOp.MAX)[0])

    def wait(self) -> None:
        """For all."""
        self.sum(0.0)

    def _reduce(self, values: tuple[float, ...], how: Any) -> list[float]:  # noqa: ANN401
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(numbers, how)
        return [float(number) for number in numbers]


@contextmanager
def _world() -> Iterator[World]:
    """Join the other processes, where a launcher started several."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not is_launched():
        yield World(0, 1, device)
        return
    join()
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def train(job: Job, on_event: OnEvent) -> Outcome:
    """Train in this process, alone or as one of several.

    Raises:
        GqaConvertError: known failures.
        KeyboardInterrupt: on SIGINT and SIGTERM, after a checkpoint.
    """
    if job.threads:
        torch.set_num_threads(job.threads)
    with quiet(), _world() as world:
        loop = _Loop(job, world, on_event)
        with catch_signals(loop.stopper), loop.metrics or nullcontext(), loop.trackers:
            return loop.run()


class _Loop:
    """One process's part of a run."""

    def __init__(self, job: Job, world: World, on_event: OnEvent) -> None:
        self.job, self.world = job, world
        self.stopper = Stopper(job)
        self.data, self.held_out = open_parts(
            Path(job.tokens), Path(job.eval_tokens) if job.eval_tokens else None, job.eval_windows,
            seq_len=job.seq_len, packing=job.packing,
        )  # fmt: skip
        torch.manual_seed(job.seed)
        self.model, _ = prepare_model(job)
        self.model.to(world.device)
        self.teacher = load_teacher(job, self.model, share=world.size == 1)
        if self.teacher is not None:
            self.teacher.to(world.device)
        self.seq2seq = bool(self.model.config.is_encoder_decoder)
        if world.size > 1:
            for model in (self.model, self.teacher):
                _shard(model, bfloat16=job.precision == "bfloat16")
        self.optimizer = make_optimizer(job, self.model)
        self.root = job.folder / CHECKPOINTS
        checkpoint = last_complete(self.root)
        world.wait()  # nobody deletes what another one looks at
        self.step = step_of(checkpoint) if checkpoint else 0
        self.metrics: MetricsLog | None = None
        if world.main:
            rotate(self.root, job.keep)
            self.metrics = MetricsLog(job.metrics, step=self.step or None, on_event=on_event)
        self.trackers = Trackers(job if world.main else None)
        if checkpoint is not None:
            self._load(checkpoint)

    def run(self) -> Outcome:
        """All steps, or until something asks to stop."""
        job, world = self.job, self.world
        try:
            if self.step == 0:
                self._evaluate()
            stopped = False
            while self.step < job.steps and not stopped:
                self._take_step()
                if self.step == job.steps or (job.eval_every and self.step % job.eval_every == 0):
                    self._evaluate()
                # A signal reaches the processes at different steps; one that stops alone leaves the others waiting.
                stopped = world.any(self.stopper.wants()) and self.step < job.steps
                if stopped or self.step == job.steps or self.step % job.checkpoint_every == 0:
                    self._save()
            if not stopped:
                self._leave_weights()
        except OSError as error:
            raise StorageError(f"cannot write to {job.folder}: {error.strerror or error}") from error
        if stopped and world.any(self.stopper.interrupted):
            raise KeyboardInterrupt
        if self.metrics is None:
            return Outcome(not stopped, self.step, None, None, None, None)
        return self.metrics.outcome(self.step, finished=not stopped)

    def _take_step(self) -> None:
        job, world = self.job, self.world
        # Dropout, where a model has any: from the step, so that a resumed run draws what it would have drawn.
        torch.manual_seed((job.seed * 1_000_003 + self.step) * world.size + world.rank)
        rate = learning_rate(self.step, job.steps, peak=job.learning_rate, warmup=job.warmup, decay=job.decay)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        whole = self.data.batch(job.seed, self.step, job.batch_size)
        count = _predicted(whole, seq2seq=self.seq2seq)
        lm = kl = total = 0.0
        for rows in whole.part(world.rank, world.size).micro(job.micro_batch):
            with self._precision():
                sums = loss_sums(
                    self.model, rows.to(world.device), loss=job.loss, teacher=self.teacher, encoder_decoder=self.seq2seq
                )
            # Gradients are means over the processes, and this is to be the mean over all tokens of the step.
            (sums.total * (world.size / count)).backward()  # type: ignore[no-untyped-call]
            total += float(sums.total.detach()) / count
            lm += float(sums.lm) / count if sums.lm is not None else 0.0
            kl += float(sums.kl) / count if sums.kl is not None else 0.0
        norm = torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.grad is not None], job.clip)
        grad_norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        total, lm, kl = world.sum(total, lm, kl)
        require_finite(self.step + 1, total, grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.metrics:
            self.metrics.step(
                self.step, loss=total, tokens=job.batch_size * job.seq_len, lr=rate, grad_norm=grad_norm, lm=lm,
                kl=kl if job.loss != "lm" else None, flops=job.flops_per_token, peak_flops=_peak_flops(world),
            )  # fmt: skip
            self.trackers.tell(self.metrics.records[-1])

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Mean loss of the next token over the held-out text; every process takes a share of it."""
        if self.held_out is None:
            return
        world = self.world
        total = count = 0.0
        self.model.eval()
        for batch in self.held_out.ordered(self.job.micro_batch * world.size):
            # All processes take part in every forward pass of a sharded model: one without rows repeats the first.
            idle = len(batch) <= world.rank
            mine = (next(batch.micro(1)) if idle else batch.part(world.rank, world.size)).to(world.device)
            inputs, labels = model_inputs(mine, encoder_decoder=self.seq2seq)
            with self._precision():
                loss = float(cross_entropy(self.model(**inputs).logits, labels))
            total += 0.0 if idle else loss
            count += 0 if idle else int((labels != IGNORED).sum())
        self.model.train()
        total, count = world.sum(total, count)
        if self.metrics:
            self.metrics.write({"step": self.step, "eval_loss": total / count})
            self.trackers.tell(self.metrics.records[-1])

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.job.precision == "bfloat16")

    def _save(self) -> None:
        folder = checkpoint_folder(self.root, self.step)
        with storing(f"the checkpoint after step {self.step}"):
            if self.metrics:
                self.metrics.sync()
                folder.mkdir(parents=True, exist_ok=True)
            self.world.wait()
            model, optimizer = get_state_dict(self.model, self.optimizer, options=_OPTIONS)
            with _alone(self.world):
                save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
            if self.world.main:
                record_complete(folder)
                rotate(self.root, self.job.keep)
            self.world.wait()

    def _load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer, options=_OPTIONS)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        with _alone(self.world):
            load(state, checkpoint_id=folder)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"],
            options=_OPTIONS,
        )  # fmt: skip
        self.world.wait()

    def _leave_weights(self) -> None:
        """The trained weights in float32 under their final name, all at once."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(self.model, options=options)
        if self.world.main:
            target = self.job.trained
            new = target.with_name(f"{target.name}.new")
            # Tied tensors have one name among these, and several in a state dict.
            own = {name for name, _ in (*self.model.named_parameters(), *self.model.named_buffers())}
            single = {name: tensor for name, tensor in weights.items() if name in own}
            with storing(str(target)):
                shutil.rmtree(new, ignore_errors=True)
                self.model.save_pretrained(new, state_dict=single, max_shard_size="1000GB")
                replace_folder(new, target)
        self.world.wait()


@contextmanager
def _alone(world: World) -> Iterator[None]:
    """Without torch's warning that there is only one process, where there is only one."""
    with warnings.catch_warnings():
        if world.size == 1:
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _shard(model: Any, *, bfloat16: bool) -> None:  # noqa: ANN401
    """Shard a model's layers, and then the rest, over all processes."""
    if model is None:
        return
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bfloat16 else None
    options: dict[str, Any] = {"mp_policy": policy} if policy else {}
    blocks = set(getattr(model, "_no_split_modules", None) or ())
    for module in list(model.modules()):
        if type(module).__name__ in blocks:
            fully_shard(module, **options)
    fully_shard(model, **options)


def _predicted(batch: Batch, *, seq2seq: bool) -> int:
    """Tokens that the loss of these rows is a mean over."""
    _, labels = model_inputs(batch, encoder_decoder=seq2seq)
    return int((labels != IGNORED).sum())


def _peak_flops(world: World) -> float | None:
    """Of all devices together, None where it is not known."""
    if world.device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(world.device).lower()
    found = [gpu.flops for key, gpu in GPUS.items() if key in name and gpu.flops]
    return max(found) * world.size if found else None
