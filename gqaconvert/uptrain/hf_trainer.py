"""The backend ``transformers``: Hugging Face's Trainer, and by it DeepSpeed and configurations of accelerate.

The order of the text, the loss, the optimiser and the schedule are those of every backend; the loop, the distribution
and the files of a checkpoint are the Trainer's. Backend options are fields of ``TrainingArguments`` (``deepspeed``,
``fsdp``, ``fsdp_config``, ``torch_compile`` ...), and ``accelerate_config``: a file for ``accelerate launch``.

A checkpoint of the Trainer is written in place, so that a kill leaves half of one, which the Trainer would take for the
last. Here a checkpoint counts only with a record of its files, written after all of them.
"""

import dataclasses
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gqaconvert.errors import InputError, MissingExtraError
from gqaconvert.uptrain.checkpoints import last_complete
from gqaconvert.uptrain.job import Capabilities, Job, OnEvent, Outcome
from gqaconvert.uptrain.processes import catch_signals, torchrun

if TYPE_CHECKING:
    from transformers import TrainingArguments

CHECKPOINTS = "hf-checkpoints"
LAUNCH_OPTION = "accelerate_config"
_OURS = frozenset((
    "output_dir", "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps",
    "learning_rate", "lr_scheduler_type", "warmup_steps", "warmup_ratio", "weight_decay", "max_grad_norm", "seed",
    "data_seed", "optim", "bf16", "fp16", "logging_steps", "logging_strategy", "save_strategy", "save_steps",
    "save_total_limit", "eval_strategy", "eval_steps", "resume_from_checkpoint", "report_to", "use_cpu",
    "train_sampling_strategy", "remove_unused_columns", "gradient_checkpointing",
    "activation_checkpointing", "average_tokens_across_devices",
    "logging_nan_inf_filter", "disable_tqdm",
))  # fmt: skip
"""Fields that the job decides."""


class TransformersTrainer:
    """HF Trainer as a backend."""

    name: ClassVar[str] = "transformers"

    def capabilities(self) -> Capabilities:
        """What it can do."""
        return Capabilities(
            losses=("lm", "distill", "mixed"), trainable=("all", "attention", "kv"), processes=True, exact_resume=True,
            encoder_decoder=True,
        )  # fmt: skip

    def check(self, job: Job) -> list[str]:
        """What would go wrong, without side effects."""
        missing = [package for package in ("transformers", "accelerate") if find_spec(package) is None]
        if missing:
            return [f"not installed: {' and '.join(missing)} (pip install 'gqaconvert[hf-trainer]')"]
        problems = _option_problems(job.backend_options)
        if job.batch_size % (job.micro_batch * job.nproc):
            problems.append(
                f"a batch of {job.batch_size} is no multiple of {job.nproc} processes x {job.micro_batch} sequences"
            )
        return problems

    def notes(self, job: Job) -> list[str]:
        """What a user should know of how this job will run."""
        import torch

        if torch.cuda.is_available():
            return []
        found = []
        if {"fsdp", "fsdp_config"} & job.backend_options.keys():
            found.append(
                "on CPU the Trainer does not shard: what runs is DDP, each process with the whole model, not FSDP"
            )
        elif job.nproc > 1:
            found.append("on CPU the processes run as DDP (gloo), each with the whole model; nothing is sharded")
        return found

    def launch(self, job: Job) -> list[str] | None:
        """By ``accelerate launch`` where a configuration is given, else by torchrun."""
        if configuration := job.backend_options.get(LAUNCH_OPTION):
            return [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(configuration)]
        return None if job.nproc == 1 else torchrun(job.nproc)

    def run(self, job: Job, on_event: OnEvent) -> Outcome:
        """Train, from the last complete checkpoint if there is one.

        Raises:
            GqaConvertError: known failures.
            KeyboardInterrupt: on SIGINT and SIGTERM, after a checkpoint.
        """
        if find_spec("transformers") is None:
            raise MissingExtraError("transformers", "transformers")
        import torch

        if job.threads:
            torch.set_num_threads(job.threads)
        from gqaconvert.stock import quiet

        with quiet():
            return _trained(job, on_event)


def _option_problems(options: Mapping[str, Any]) -> list[str]:
    from transformers import TrainingArguments

    known = {field.name for field in dataclasses.fields(TrainingArguments)} | {LAUNCH_OPTION}
    problems = [f"TrainingArguments has no field {name!r}" for name in sorted(options.keys() - known)]
    problems += [f"{name!r} is decided by the job, not by a backend option" for name in sorted(options.keys() & _OURS)]
    for name in (LAUNCH_OPTION, "deepspeed"):
        file = options.get(name)
        if isinstance(file, str) and not Path(file).is_file():
            problems.append(f"{name}: no such file: {file}")
    if "deepspeed" in options and find_spec("deepspeed") is None:
        problems.append("the package deepspeed is not installed")
    return problems


def _trained(job: Job, on_event: OnEvent) -> Outcome:
    from transformers.trainer_utils import set_seed

    from gqaconvert.uptrain.data import open_parts
    from gqaconvert.uptrain.hf_loop import LoopTrainer
    from gqaconvert.uptrain.models import load_teacher, prepare_model

    parts = open_parts(
        Path(job.tokens), Path(job.eval_tokens) if job.eval_tokens else None, job.eval_windows,
        seq_len=job.seq_len, packing=job.packing,
    )  # fmt: skip
    arguments = training_arguments(job)
    set_seed(job.seed)
    model, _ = prepare_model(job)
    teacher = load_teacher(job, model, share=arguments.deepspeed is None and not arguments.fsdp)
    checkpoint = last_complete(job.folder / CHECKPOINTS)
    trainer = LoopTrainer(job, arguments, model, teacher, parts, on_event, checkpoint)
    with catch_signals(trainer.stopper):
        return trainer.run()


def training_arguments(job: Job) -> "TrainingArguments":
    """The job as the Trainer's settings.

    Raises:
        InputError: the Trainer refuses them.
    """
    import torch
    from transformers import TrainingArguments

    world = int(os.environ.get("WORLD_SIZE", job.nproc))
    options = {name: value for name, value in job.backend_options.items() if name != LAUNCH_OPTION}
    if job.batch_size % (job.micro_batch * world):
        raise InputError(
            f"a batch of {job.batch_size} is no multiple of {world} processes x {job.micro_batch} sequences"
        )
    try:
        return TrainingArguments(
            output_dir=str(job.folder / CHECKPOINTS),
            max_steps=job.steps,
            per_device_train_batch_size=job.micro_batch,
            gradient_accumulation_steps=job.batch_size // (job.micro_batch * world),
            learning_rate=job.learning_rate,
            weight_decay=job.weight_decay,
            max_grad_norm=job.clip,
            bf16=job.precision == "bfloat16",
            use_cpu=not torch.cuda.is_available(),
            seed=job.seed,
            train_sampling_strategy="sequential",
            average_tokens_across_devices=True,
            remove_unused_columns=False,
            dataloader_pin_memory=torch.cuda.is_available(),
            logging_strategy="steps",
            logging_steps=1,
            logging_nan_inf_filter=False,  # it would put the mean of earlier losses in a NaN's place
            save_strategy="steps",
            save_steps=job.checkpoint_every,
            save_total_limit=None,  # rotated here, once the newer one is complete
            report_to=list(job.report_to) or "none",
            disable_tqdm=True,
            **{"ddp_find_unused_parameters": False, **options},
        )
    except (ValueError, TypeError, ImportError) as error:
        raise InputError(f"the Trainer refuses its settings: {' '.join(str(error).split())[:300]}") from error
