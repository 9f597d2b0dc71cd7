"""The backend ``torch``, the default: a plain loop in one process, or the same loop sharded over several by FSDP2."""

from importlib.util import find_spec
from typing import ClassVar

from gqaconvert.uptrain.job import LOSSES, TRAINABLE, Capabilities, Job, OnEvent, Outcome
from gqaconvert.uptrain.processes import torchrun, world_size
from gqaconvert.uptrain.trackers import TRACKERS


class TorchTrainer:
    """One process on a CPU or a GPU; torchrun and FSDP2 for more."""

    name: ClassVar[str] = "torch"

    def capabilities(self) -> Capabilities:
        """What it can do."""
        return Capabilities(LOSSES, TRAINABLE, processes=True, exact_resume=True, encoder_decoder=True)

    def check(self, job: Job) -> list[str]:
        """What would go wrong, without side effects."""
        problems = [f"the trainer torch has no option {name!r}" for name in sorted(job.backend_options)]
        if job.batch_size % world_size(job):
            problems.append(f"a batch of {job.batch_size} is no multiple of {world_size(job)} processes")
        problems += [
            f"no tracker {name!r}, but {', '.join(TRACKERS)}" for name in job.report_to if name not in TRACKERS
        ]
        problems += [f"the package {name} is not installed" for name in job.report_to if find_spec(name) is None]
        return problems

    def launch(self, job: Job) -> list[str] | None:
        """By torchrun where there are to be several processes."""
        return None if job.nproc == 1 else torchrun(job.nproc)

    def run(self, job: Job, on_event: OnEvent) -> Outcome:
        """Train, from the last complete checkpoint if there is one.

        Raises:
            GqaConvertError: known failures.
            KeyboardInterrupt: on SIGINT and SIGTERM, after a checkpoint.
        """
        from gqaconvert.uptrain.torch_loop import train

        return train(job, on_event)
