"""What the ``transformers`` backend changes in HF Trainer: data by (seed, step), our losses, schedule and metrics."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from gqaconvert.errors import StorageError
from gqaconvert.uptrain.checkpoints import (
    checkpoint_folder,
    record_complete,
    replace_folder,
    rotate,
    step_of,
    storing,
)
from gqaconvert.uptrain.data import TokenData
from gqaconvert.uptrain.hf_trainer import CHECKPOINTS
from gqaconvert.uptrain.job import Job, OnEvent, Outcome
from gqaconvert.uptrain.loss import evaluate, loss_sums
from gqaconvert.uptrain.metrics import MetricsLog, require_finite
from gqaconvert.uptrain.models import make_optimizer
from gqaconvert.uptrain.packing import Batch
from gqaconvert.uptrain.processes import Stopper
from gqaconvert.uptrain.schedule import learning_rate

Parts = tuple[TokenData, TokenData | None]


class Samples(Dataset[dict[str, Tensor]]):
    """All samples of a run in the order in which they are trained on; a step's are neighbours."""

    def __init__(self, data: TokenData, seed: int, count: int) -> None:
        self._data, self._seed, self._count = data, seed, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return _tensors(self._data.samples(self._seed, [number]))


def _tensors(batch: Batch) -> dict[str, Tensor]:
    found = {name: getattr(batch, name) for name in ("input_ids", "labels", "position_ids", "document_ids")}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _collate(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}


class LoopTrainer(Trainer):
    """HF Trainer with the project's data order, losses, optimiser, schedule, metrics and checkpoints."""

    def __init__(
        self,
        job: Job,
        arguments: TrainingArguments,
        model: Any,  # noqa: ANN401
        teacher: Any,  # noqa: ANN401
        parts: Parts,
        on_event: OnEvent,
        checkpoint: Path | None,
    ) -> None:
        self.job, self.student, self.teacher, self.held_out, self.checkpoint = job, model, teacher, parts[1], checkpoint
        self.stopper = Stopper(job)
        self.parts_of_loss = torch.zeros(2)
        self.start = step_of(checkpoint) if checkpoint else 0
        samples = Samples(parts[0], job.seed, job.steps * job.batch_size)
        arguments._n_gpu = min(arguments.n_gpu, 1)  # several GPUs in one process would be DataParallel
        super().__init__(model, arguments, data_collator=_collate, train_dataset=samples, callbacks=[_Stop(self)])
        self.remove_callback(PrinterCallback)
        self.model_accepts_loss_kwargs = True  # so that the Trainer counts the tokens of a whole step for us
        self.main = self.is_world_process_zero()
        self.metrics = MetricsLog(job.metrics, step=self.start or None, on_event=on_event) if self.main else None
        if self.teacher is not None:
            self.teacher.to(arguments.device)

    def run(self) -> Outcome:
        """Train to the end, or to a stop.

        Raises:
            GqaConvertError: the loss is not finite, or the disk is full.
            KeyboardInterrupt: after a checkpoint, when that was asked for.
        """
        job = self.job
        if self.main:
            rotate(job.folder / CHECKPOINTS, job.keep)
        self._wait()
        try:
            if self.start == 0:
                self._evaluate_now(0)
            if self.start < job.steps:
                self.train(resume_from_checkpoint=str(self.checkpoint) if self.checkpoint else None)
            else:
                self._load_from_checkpoint(str(self.checkpoint))
            done = int(self.state.global_step) if self.start < job.steps else self.start
            finished = done >= job.steps
            if finished:
                self._leave_weights()
        except OSError as error:
            raise StorageError(f"cannot write to {job.folder}: {error.strerror or error}") from error
        if self.stopper.interrupted and not finished:
            raise KeyboardInterrupt
        if self.metrics is None:
            return Outcome(finished, done, None, None, None, None)
        with self.metrics:
            return self.metrics.outcome(done, finished=finished)

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:  # noqa: ANN401, ARG002
        """The project's AdamW (DeepSpeed brings its own)."""
        if self.optimizer is None:
            self.optimizer = make_optimizer(self.job, self.student)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """The project's schedule: its first step is above zero."""
        if self.lr_scheduler is None:
            job = self.job

            def factor(step: int) -> float:
                rate = learning_rate(step, num_training_steps, peak=1.0, warmup=job.warmup, decay=job.decay)
                return max(rate, 0.0)

            scheduled: Any = optimizer or self.optimizer
            self.lr_scheduler = LambdaLR(scheduled, factor)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(
        self,
        model: Any,  # noqa: ANN401
        inputs: dict[str, Tensor],
        return_outputs: bool = False,  # noqa: ARG002
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Sum over these rows, divided by the tokens of the whole step; the sum over processes is the step's mean."""
        batch = Batch(**inputs)
        sums = loss_sums(
            model, batch, loss=self.job.loss, teacher=self.teacher, encoder_decoder=_is_encoder_decoder(self.student)
        )
        assert num_items_in_batch is not None
        for place, part in enumerate((sums.lm, sums.kl)):
            if part is not None:
                self.parts_of_loss[place] += float(part) / float(num_items_in_batch)
        # Gradients are averaged over processes.
        loss: Tensor = sums.total / num_items_in_batch * self.args.world_size
        return loss

    def _get_num_items_in_batch(
        self, batch_samples: list[dict[str, Tensor]], device: torch.device
    ) -> Tensor | int | None:
        if _is_encoder_decoder(self.student):
            half = batch_samples[0]["labels"].shape[1] // 2
            batch_samples = [
                {"labels": torch.nn.functional.pad(s["labels"][:, half:], (1, 0), value=-100)} for s in batch_samples
            ]
        return super()._get_num_items_in_batch(batch_samples, device)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """One record a step; on all processes, since the losses are summed over them."""
        if "grad_norm" not in logs:
            return
        parts = self.parts_of_loss.clone()
        if self.args.world_size > 1:
            parts = parts.to(self.args.device)
            dist.all_reduce(parts)
        self.parts_of_loss.zero_()
        lm, kl = (None if self.job.loss == "lm" and place == 1 else float(part) for place, part in enumerate(parts))
        step = int(self.state.global_step)
        loss, grad_norm = logs["loss"], float(logs["grad_norm"])
        require_finite(step, loss, grad_norm)  # means over all processes, so all of them end alike
        if self.metrics:
            tokens = self.job.batch_size * self.job.seq_len
            self.metrics.step(
                step, loss=loss, tokens=tokens, lr=logs["learning_rate"], grad_norm=grad_norm, lm=lm, kl=kl
            )
        if self.args.report_to:
            super().log(logs, start_time)
        if step == self.job.steps or (self.job.eval_every and step % self.job.eval_every == 0):
            self._evaluate_now(step)

    def _evaluate_now(self, step: int) -> None:
        if self.held_out is None:
            return
        device = self.args.device
        if step == 0:
            self.student.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.args.bf16):
            batches = self.held_out.ordered(self.job.micro_batch)
            loss = evaluate(self.student, batches, encoder_decoder=_is_encoder_decoder(self.student))
        if self.metrics:
            self.metrics.write({"step": step, "eval_loss": loss})

    def _save_checkpoint(self, model: Any, trial: Any) -> None:  # noqa: ANN401
        if self.metrics:
            self.metrics.sync()
        with storing(f"the checkpoint after step {self.state.global_step}"):
            super()._save_checkpoint(model, trial)
            self._wait()
            if self.main:
                root = self.job.folder / CHECKPOINTS
                record_complete(checkpoint_folder(root, self.state.global_step))
                rotate(root, self.job.keep)
        self._wait()

    def _wait(self) -> None:
        if self.args.world_size > 1:
            dist.barrier()

    def _leave_weights(self) -> None:
        """The trained weights in float32 under their final name, all at once."""
        target = self.job.trained
        temporary = target.with_name(f"{target.name}.new")
        with storing(str(target)):
            if self.main:
                shutil.rmtree(temporary, ignore_errors=True)
            self._wait()
            self.save_model(str(temporary))
            self._wait()
            if self.main:
                replace_folder(temporary, target)
            self._wait()


class _Stop(TrainerCallback):
    """Ends the training after a step, with a checkpoint, when one of the processes was asked to."""

    def __init__(self, trainer: LoopTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: TrainingArguments, state: Any, control: Any, **more: object) -> Any:  # noqa: ANN401, ARG002
        """Called by the Trainer, on all processes."""
        wants = self._trainer.stopper.wants()
        if args.world_size > 1:
            # A signal reaches the processes at different steps, and one that stops alone leaves the others waiting.
            agreed = torch.tensor(float(wants), device=args.device)
            dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
            wants = bool(agreed)
        if wants and state.global_step < state.max_steps:
            control.should_save = control.should_training_stop = True
        return control


def _is_encoder_decoder(model: Any) -> bool:  # noqa: ANN401
    return bool(getattr(model.config, "is_encoder_decoder", False))
