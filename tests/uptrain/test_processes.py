"""Launching, following, stopping and outliving: real processes and signals, without a model."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gqaconvert.errors import CheckFailedError, DestinationError, EnvironmentFailure
from gqaconvert.uptrain.job import Job, Outcome
from gqaconvert.uptrain.processes import LOG, exclusive, launch
from tests.uptrain.jobs import FORKS, ended, make_job


def probe(job: Job, on_event: Any = lambda record: None) -> Outcome:  # noqa: ANN401
    with exclusive(job) as lock:
        return launch(job, [sys.executable], on_event, lock, module="tests.uptrain.probe")


def job_in(folder: Path, **changes: Any) -> Job:  # noqa: ANN401
    return make_job(folder, folder, folder, "run", **changes)


def test_result_and_metrics_come_back(tmp_path: Path) -> None:
    job = job_in(tmp_path, steps=3)
    for _ in range(2):
        told: list[Mapping[str, Any]] = []
        assert probe(job, told.append) == Outcome(True, 3, 1.0, 1.0, None, 2.0, (3,))
        assert [record["step"] for record in told] == [1, 2, 3]
    assert Job.load(job.folder / "job.json") == job


def test_errors_come_back(tmp_path: Path) -> None:
    with pytest.raises(CheckFailedError, match="the loss is nan") as caught:
        probe(job_in(tmp_path, learning_rate=2.0))
    assert caught.value.hint == "less"
    job = job_in(tmp_path, learning_rate=-1.0)
    with pytest.raises(EnvironmentFailure, match="ended with 7") as silent:
        probe(job)
    assert str(job.folder / LOG) in str(silent.value.hint)


def signal_after(job: Job, step: int, *numbers: int) -> None:
    """In a process of its own: launch, and get signals when a step is told."""

    def on_event(record: Mapping[str, Any]) -> None:
        if record["step"] == step:
            for number in numbers:
                os.kill(os.getpid(), number)

    try:
        probe(job, on_event)
    except KeyboardInterrupt:
        os._exit(130)
    os._exit(0)


def workers(job: Job) -> int:
    """Processes that work on a job."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += f"{job.folder}/job.json" in path.read_bytes().decode(errors="replace")
    return found


@pytest.mark.parametrize("numbers", [(signal.SIGINT,), (signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)])
def test_a_signal_stops_the_processes(numbers: tuple[int, ...], tmp_path: Path) -> None:
    job = job_in(tmp_path, steps=2000)
    process = FORKS.Process(target=signal_after, args=(job, 2, *numbers))
    process.start()
    assert ended(process) == 130
    assert workers(job) == 0
    assert probe(job_in(tmp_path, steps=2)).finished  # the request is not kept for the next run


def test_a_kill_of_the_launching_process_ends_the_others(tmp_path: Path) -> None:
    job = job_in(tmp_path, steps=2000)
    process = FORKS.Process(target=signal_after, args=(job, 2, signal.SIGKILL))
    process.start()
    assert ended(process) == -signal.SIGKILL
    assert probe(job_in(tmp_path, steps=2)).finished  # at once: it waits for those that are still running
    assert workers(job) == 0


def test_a_folder_is_for_one_run_at_a_time(tmp_path: Path) -> None:
    job = job_in(tmp_path)
    with exclusive(job), pytest.raises(DestinationError, match="another run"), exclusive(job):
        pass


LEAVES_EARLY = """
import os, sys, time
import torch
import torch.distributed as dist
from gqaconvert.cli.app import main

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
for _ in range(1000):
    dist.all_reduce(torch.ones(1000), async_op=True)
    if rank == 0:
        time.sleep(0.001)
sys.argv = ["gqaconvert", "--version"]
main()
"""


def test_a_process_ends_well_while_gloo_still_works(tmp_path: Path) -> None:
    """Rank 1 ends with operations in flight, whose tensors gloo's threads free; Python's own end is then SIGABRT."""
    script = tmp_path / "script.py"
    script.write_text(LEAVES_EARLY)

    def start(rank: int) -> subprocess.Popen[str]:
        environment = os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, str(script), str(tmp_path / "store")]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with start(0) as slow, start(1) as early:
        out, errors = early.communicate(timeout=120)
        slow.kill()
    assert (early.returncode, out.split()[0]) == (0, "gqaconvert"), errors
