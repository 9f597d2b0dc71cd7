"""Signals, the lock of a working folder, and a job in several processes: what all backends share.

A job in several processes is a launcher (torchrun, or another) that starts ``python -m gqaconvert.uptrain.worker JOB``;
rank 0 leaves the result in ``outcome.json``. A file asks them to stop, as launchers kill what does not end soon after a
signal. They end by themselves when the one that launched them is gone, so that the same command can be given again at
once.
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from gqaconvert import errors
from gqaconvert.checkpoint.writer import write_file
from gqaconvert.errors import DestinationError, EnvironmentFailure, GqaConvertError, StorageError
from gqaconvert.uptrain import is_launched
from gqaconvert.uptrain.job import Job, OnEvent, Outcome

JOB, OUTCOME, LOG, LOCK, STOP = "job.json", "outcome.json", "processes.log", "lock", "stop"
WORKER = "gqaconvert.uptrain.worker"
_PATIENCE = 3.0
"""Seconds: processes that lost the one that launched them look for it twice a second."""
_LAUNCHED_BY = "GQACONVERT_LAUNCHED_BY"


class Stopper:
    """Asks a loop to stop after the present step: on a signal, or when the time is over."""

    def __init__(self, job: Job | None = None) -> None:
        max_seconds = job.max_seconds if job else None
        self._signalled = False
        self._flag = job.folder / STOP if job else None
        self._deadline = None if max_seconds is None else time.monotonic() + max_seconds

    def signal(self) -> None:
        """A signal has come."""
        self._signalled = True

    @property
    def interrupted(self) -> bool:
        """Whether someone wants the run to stop."""
        return self._signalled or (self._flag is not None and self._flag.exists())

    def wants(self) -> bool:
        """Whether it is time to stop."""
        return self.interrupted or (self._deadline is not None and time.monotonic() >= self._deadline)


@contextlib.contextmanager
def catch_signals(stopper: Stopper) -> Iterator[None]:
    """SIGINT and SIGTERM ask for a stop; a second one of them acts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if stopper.interrupted:
            raise KeyboardInterrupt
        stopper.signal()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def exclusive(job: Job) -> Iterator[int]:
    """The working folder, for one run at a time; gives the lock's descriptor, which the launched processes inherit.

    So the lock of a launching process that was killed is free once the processes that it launched have ended, which
    is what is waited for here.

    Raises:
        DestinationError: another run has it.
        StorageError: it cannot be made.
    """
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
        file = (job.folder / LOCK).open("w")
    except OSError as error:
        raise StorageError(f"cannot write to {job.folder}: {error.strerror}") from error
    with file:
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DestinationError(
                        f"another run works in {job.folder} right now", hint="wait for it to end"
                    ) from None
                time.sleep(0.1)
        (job.folder / STOP).unlink(missing_ok=True)
        yield file.fileno()


def is_main() -> bool:
    """Whether this process is the only one, or the first of several."""
    return os.environ.get("RANK", "0") == "0" or not is_launched()


@contextlib.contextmanager
def together() -> Iterator[None]:
    """What is within is done by the first process first, and then, when that is there, by the others."""
    if not is_launched():
        yield
        return
    import torch.distributed as dist

    join()
    if not is_main():
        dist.barrier()
    yield
    if is_main():
        dist.barrier()


def join() -> None:
    """Meet the other processes that a launcher started; once, as torchrun's store takes it badly a second time."""
    import torch.distributed as dist

    if not dist.is_initialized():
        # By no name, there is a backend for CPUs and one for GPUs. A day: tokenising may take hours.
        dist.init_process_group(timeout=timedelta(days=1))


def leave(code: int) -> NoReturn:
    """End one of several processes with an exit code, without Python's finalisation.

    A thread of gloo lets go of the tensors of the last operations when it comes to it, and needs the GIL for that. A
    C++ thread that asks for the GIL during finalisation takes the process down by SIGABRT, with all its work done.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def world_size(job: Job) -> int:
    """How many processes share the job's batches."""
    return int(os.environ.get("WORLD_SIZE", "1")) if is_launched() else job.nproc


def torchrun(count: int) -> list[str]:
    """The launcher for ``count`` processes on this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]


def launch(job: Job, launcher: Sequence[str], on_event: OnEvent, lock: int, *, module: str = WORKER) -> Outcome:
    """Run a job by a launcher, pass its metrics on as they come, and return what rank 0 left.

    ``lock`` is what `exclusive` gave.

    Raises:
        GqaConvertError: what the processes raised.
        EnvironmentFailure: they ended without a word.
        KeyboardInterrupt: after their checkpoint.
    """
    folder = job.folder
    (folder / OUTCOME).unlink(missing_ok=True)
    job.save(folder / JOB)
    command = [*launcher, "-m", module, str(folder / JOB)]
    environment = {**os.environ, _LAUNCHED_BY: str(os.getpid())}
    stopper, position, started = Stopper(), 0, time.time_ns()
    with (folder / LOG).open("ab") as log, catch_signals(stopper):
        # A session of its own: a Ctrl-C reaches only this process.
        running = subprocess.Popen(  # noqa: S603
            command, stdout=log, stderr=log, env=environment, start_new_session=True, pass_fds=(lock,)
        )
        try:
            ended = False
            while not ended:
                ended = running.poll() is not None
                position = _follow(job.metrics, started, position, on_event)
                if stopper.interrupted:
                    (folder / STOP).touch()
                time.sleep(0.1)
        finally:
            running.terminate()
            running.wait()
    try:
        return _read_outcome(folder / OUTCOME)
    except (OSError, ValueError):
        raise EnvironmentFailure(
            f"the processes ended with {running.returncode} and no result", hint=f"what they said is in {folder / LOG}"
        ) from None


def _follow(path: Path, started: int, position: int, on_event: OnEvent) -> int:
    """Report the lines of the metrics behind ``position``; returns where to go on."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        if os.fstat(file.fileno()).st_mtime_ns < started:  # of an earlier run, and not yet cut back
            return 0
        file.seek(position)
        for line in file:
            if not line.endswith(b"\n"):
                break
            position += len(line)
            on_event(json.loads(line))
    return position


def _read_outcome(path: Path) -> Outcome:
    document = json.loads(path.read_text())
    if document["kind"] == "interrupted":
        raise KeyboardInterrupt
    if document["kind"] == "error":
        kind = getattr(errors, document["error"], GqaConvertError)
        error: GqaConvertError = kind.__new__(kind)
        GqaConvertError.__init__(error, document["message"], hint=document["hint"])
        raise error
    return Outcome(**{**document["outcome"], "spikes": tuple(document["outcome"]["spikes"])})


def work(path: Path, train: Callable[[Job, OnEvent], Outcome]) -> int:
    """One of several processes: trains; rank 0 leaves the result beside the job. Returns the exit code."""
    _end_with_launcher()
    job = Job.load(path)
    document: dict[str, Any]
    code = 0
    try:
        document = {"kind": "outcome", "outcome": dataclasses.asdict(train(job, lambda record: None))}
    except KeyboardInterrupt:
        document = {"kind": "interrupted"}
    except GqaConvertError as error:
        document = {"kind": "error", "error": type(error).__name__, "message": error.message, "hint": error.hint}
        code = error.exit_code
    if int(os.environ.get("RANK", "0")) == 0:
        write_file(job.folder / OUTCOME, json.dumps(document).encode())
    return code


def _end_with_launcher() -> None:
    """End this process when its parent, or the one that launched the whole, is gone: killed, they cannot tell it."""
    parent, launcher = os.getppid(), int(os.environ.get(_LAUNCHED_BY, "0"))

    def watch() -> None:
        while os.getppid() == parent and (not launcher or _is_alive(launcher)):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
