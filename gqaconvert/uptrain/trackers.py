"""Trackers beside metrics.jsonl: tensorboard, wandb, trackio; imported only when asked for."""

from collections.abc import Mapping
from typing import Any

from gqaconvert.errors import InputError, MissingExtraError
from gqaconvert.uptrain.job import Job

TRACKERS = ("tensorboard", "wandb", "trackio")


class Trackers:
    """The trackers of a job, each told every record of the metrics; none for None. A context manager."""

    def __init__(self, job: Job | None) -> None:
        self._open: list[Any] = []
        for name in job.report_to if job else ():
            assert job is not None
            if name not in TRACKERS:
                raise InputError(f"no tracker {name!r}", hint=f"known: {', '.join(TRACKERS)}")
            try:
                self._open.append(_Board(job) if name == "tensorboard" else _Service(name, job))
            except ImportError:
                raise MissingExtraError(name, name) from None

    def tell(self, record: Mapping[str, Any]) -> None:
        """Pass a record on."""
        numbers = {name: value for name, value in record.items() if name != "step" and not isinstance(value, bool)}
        for tracker in self._open:
            tracker.tell(int(record["step"]), numbers)

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_: object) -> None:
        for tracker in self._open:
            tracker.close()


class _Board:
    def __init__(self, job: Job) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(job.folder / "tensorboard"))

    def tell(self, step: int, numbers: Mapping[str, Any]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Service:
    """wandb, and trackio, which has its interface."""

    def __init__(self, name: str, job: Job) -> None:
        from importlib import import_module

        self._module = import_module(name)
        self._module.init(project="gqaconvert", name=job.folder.name, config={"model": job.model, "steps": job.steps})

    def tell(self, step: int, numbers: Mapping[str, Any]) -> None:
        self._module.log(dict(numbers), step=step)

    def close(self) -> None:
        self._module.finish()
