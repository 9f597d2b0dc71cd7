"""The trainer backends that are installed: entry points, imported only when one is chosen."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from gqaconvert.errors import InputError, MissingExtraError
from gqaconvert.uptrain import is_launched
from gqaconvert.uptrain.job import Capabilities, Job, OnEvent, Outcome, Trainer
from gqaconvert.uptrain.processes import exclusive, launch

GROUP = "gqaconvert.trainers"
_BUILT_IN = {
    "torch": "gqaconvert.uptrain.torch_trainer:TorchTrainer",
    "transformers": "gqaconvert.uptrain.hf_trainer:TransformersTrainer",
}
"""Also registered as entry points; here so that a checkout that is not installed has them, and no one replaces them."""


@dataclass(frozen=True)
class TrainerInfo:
    """A backend as `gqaconvert trainers` lists it; ``fault`` says why it cannot be used."""

    name: str
    package: str
    capabilities: Capabilities | None
    fault: str | None


def load_trainer(name: str) -> Trainer:
    """The backend of that name.

    Raises:
        InputError: there is none, or its package is broken.
        MissingExtraError: it needs a package that is not installed.
    """
    points = _points()
    if name not in points:
        raise InputError(f"no trainer {name!r}", hint=f"installed: {', '.join(sorted(points))}")
    return _load(points[name])


def run_job(job: Job, on_event: OnEvent) -> Outcome:
    """Train by the job's backend, in this process or in those that it launches.

    In a process that a launcher started, this is one of several; else the working folder is locked.

    Raises:
        GqaConvertError: known failures.
        KeyboardInterrupt: on SIGINT and SIGTERM, after a checkpoint.
    """
    trainer = load_trainer(job.trainer)
    if faults := check_job(trainer, job):
        raise InputError("; ".join(faults))
    if is_launched():
        return trainer.run(job, on_event)
    with exclusive(job) as lock:
        launcher = trainer.launch(job)
        return trainer.run(job, on_event) if launcher is None else launch(job, launcher, on_event, lock)


def check_job(trainer: Trainer, job: Job) -> list[str]:
    """What a backend does not do, and what it finds fault with."""
    can, name = trainer.capabilities(), trainer.name
    faults = [
        f"the trainer {name} does not know {option} {value!r}"
        for option, value, known in (("--loss", job.loss, can.losses), ("--trainable", job.trainable, can.trainable))
        if value not in known
    ]
    if job.nproc > 1 and not can.processes:
        faults.append(f"the trainer {name} runs in one process only")
    return faults + trainer.check(job)


def list_trainers() -> list[TrainerInfo]:
    """Every backend; one that is broken is listed with its fault, and breaks no other."""
    found = []
    for name, point in sorted(_points().items()):
        package = point.dist.name if point.dist else point.module.partition(".")[0]
        try:
            found.append(TrainerInfo(name, package, _load(point).capabilities(), None))
        except Exception as error:  # whatever a stranger's package raises
            found.append(TrainerInfo(name, package, None, " ".join(str(error).split())[:200] or type(error).__name__))
    return found


def _points() -> dict[str, EntryPoint]:
    built_in = {name: EntryPoint(name, value, GROUP) for name, value in _BUILT_IN.items()}
    return {point.name: point for point in entry_points(group=GROUP)} | built_in


def _load(point: EntryPoint) -> Trainer:
    try:
        made: Any = point.load()()
    except MissingExtraError:
        raise
    except Exception as error:
        raise InputError(f"the trainer {point.name!r} ({point.value}) cannot be loaded: {error}") from error
    lacking = [name for name in ("name", "capabilities", "check", "launch", "run") if not hasattr(made, name)]
    if lacking:
        raise InputError(f"the trainer {point.name!r} ({point.value}) has no {', '.join(lacking)}")
    trainer: Trainer = made
    return trainer
