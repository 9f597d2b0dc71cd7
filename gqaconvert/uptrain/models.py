"""Models for training: the stock class in float32, what of it is trained, and the teacher."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.errors import CheckpointError, InputError, MissingExtraError, UnsupportedModelError
from gqaconvert.families import Part
from gqaconvert.inspection import read_checkpoint
from gqaconvert.stock import load_stock
from gqaconvert.uptrain.job import Job, Trainable
from gqaconvert.uptrain.packing import require_apart

_KV = (Part.KEY, Part.VALUE, Part.QKV, Part.KEY_NORM, Part.KEY_NORM_LIST)


def load_model(folder: Path) -> Any:  # noqa: ANN401
    """The stock model of a folder in float32, in training mode.

    Raises:
        MissingExtraError: transformers is not installed.
        CheckpointError: transformers refuses the folder, or has to make up weights.
    """
    model, faults = load_stock(LocalFolder.open(folder))
    if made_up := [fault for fault in faults if fault.startswith(("missing", "mismatched"))]:
        raise CheckpointError(f"{folder} does not fit its stock class: {', '.join(made_up[:3])}")
    config = model.config
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = config.pad_token_id  # T5 begins with its padding
    return model.train()


def choose_trained(model: nn.Module, folder: Path, trainable: Trainable) -> list[str]:
    """Freeze all parameters but those that are to be trained; returns their names.

    Raises:
        UnsupportedModelError: the attention's tensors cannot be told among the class's parameters.
    """
    if trainable == "all":
        return [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    checkpoint = read_checkpoint(LocalFolder.open(folder))
    if not checkpoint.sites and checkpoint.obstacle is not None:
        raise UnsupportedModelError(
            f"--trainable {trainable} needs a known layout of the attention: {checkpoint.obstacle.message}",
            hint="--trainable all",
        )
    wanted = {
        tensor.entry.name
        for site in checkpoint.sites
        for tensor in site.tensors
        if trainable == "attention" or tensor.part in _KV
    }
    trained = [name for name, _ in model.named_parameters() if name in wanted or name.removeprefix("model.") in wanted]
    if len(trained) != len(wanted):
        raise UnsupportedModelError(
            f"the stock class names its parameters otherwise than the files: {len(trained)} of {len(wanted)} found",
            hint="--trainable all",
        )
    model.requires_grad_(False)
    for name in trained:
        model.get_parameter(name).requires_grad_(True)
    return trained


def load_teacher(job: Job, student: nn.Module, *, share: bool) -> Any:  # noqa: ANN401
    """The unconverted model, frozen; None where the loss needs none.

    Args:
        job: says where it is.
        student: the model that is trained; with ``share`` the teacher uses the student's own tensors wherever they
            are frozen and bit-identical: with ``trainable="kv"`` after a mean all but K and V.
        share: see there.

    Raises:
        InputError: no teacher, or one with another vocabulary.
        CheckpointError: it cannot be loaded.
    """
    if job.loss == "lm":
        return None
    if job.teacher is None:
        raise InputError(f"--loss {job.loss} needs the unconverted model", hint="--teacher DIR")
    teacher = load_model(Path(job.teacher)).eval().requires_grad_(False)
    ours, theirs = (model.get_input_embeddings().weight.shape[0] for model in (student, teacher))  # type: ignore[operator]
    if ours != theirs:
        raise InputError(
            f"{job.teacher} is no teacher for {job.model}: it has {theirs} tokens, the model {ours}",
            hint="--teacher is the model that was converted",
        )
    if share:
        frozen = {name: parameter for name, parameter in student.named_parameters() if not parameter.requires_grad}
        for name, parameter in list(teacher.named_parameters()):
            own = frozen.get(name)
            if own is not None and own.shape == parameter.shape and torch.equal(own, parameter):
                parent, _, leaf = name.rpartition(".")
                setattr(teacher.get_submodule(parent), leaf, own)
        teacher.tie_weights()
    return teacher


def prepare_model(job: Job) -> tuple[Any, list[str]]:
    """(the model of a job, ready to be trained; names of the parameters that are).

    Raises:
        GqaConvertError: it cannot be loaded, or not be trained as asked.
    """
    model = load_model(Path(job.model))
    trained = choose_trained(model, Path(job.model), job.trainable)
    if job.packing == "document":
        require_apart(model, model.get_input_embeddings().weight.shape[0])
    if job.checkpoint_activations:
        # Renamed within transformers 5.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model, trained


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters as an optimiser takes them: weight decay on matrices only."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]


def make_optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with the second moment's memory that is usual for language models (0.95), or its 8-bit form.

    Raises:
        MissingExtraError: bitsandbytes is not installed.
    """
    groups = [group for group in decay_groups(model, job.weight_decay) if group["params"]]
    options: dict[str, Any] = {"lr": job.learning_rate, "betas": (0.9, 0.95)}
    if job.optimizer == "adamw8bit":
        try:
            from bitsandbytes.optim import AdamW8bit
        except ImportError:
            raise MissingExtraError("bitsandbytes", "8bit") from None
        optimizer: torch.optim.Optimizer = AdamW8bit(groups, **options)
        return optimizer
    return torch.optim.AdamW(groups, **options)
