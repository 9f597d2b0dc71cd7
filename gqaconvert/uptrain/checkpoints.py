"""Checkpoints of a run: complete or of no account. A backend writes what it likes into ``checkpoint-STEP``."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from gqaconvert.checkpoint.writer import sync_tree, write_file
from gqaconvert.errors import StorageError

RECORD = "gqaconvert-complete.json"


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Turn whatever a library raises when it cannot write into one error: torch has none of its own for a full disk.

    Raises:
        StorageError: something was raised.
    """
    try:
        yield
    except (OSError, RuntimeError, CheckpointException, SafetensorError) as error:
        causes = error.failures.values() if isinstance(error, CheckpointException) else [error]
        text = "; ".join(sorted({" ".join(str(cause).split())[:200] for cause in causes}))
        raise StorageError(
            f"cannot write {what}: {text}", hint="is the disk full? The same command goes on from the last checkpoint"
        ) from error


def checkpoint_folder(root: Path, step: int) -> Path:
    """Where the checkpoint after a step goes."""
    return root / f"checkpoint-{step}"


def step_of(checkpoint: Path) -> int:
    """After which step it was taken."""
    return int(checkpoint.name.rpartition("-")[2])


def record_complete(folder: Path) -> None:
    """Say that a checkpoint is whole: names and sizes of its files, written and forced to the disk after them.

    Raises:
        OSError: it cannot be written.
    """
    sync_tree(folder)
    sizes = {
        path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()
    }
    temporary = folder / f"{RECORD}.new"
    write_file(temporary, json.dumps({"files": sizes}).encode())
    temporary.replace(folder / RECORD)


def is_complete(folder: Path) -> bool:
    """Whether a checkpoint has its record, and all files that it names, in full."""
    try:
        files = json.loads((folder / RECORD).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def checkpoints(root: Path) -> list[Path]:
    """All checkpoints, complete or not, by step."""
    found = [path for path in root.glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    return sorted(found, key=step_of)


def last_complete(root: Path) -> Path | None:
    """The last complete checkpoint, None if there is none."""
    return next((path for path in reversed(checkpoints(root)) if is_complete(path)), None)


def rotate(root: Path, keep: int) -> None:
    """Delete what is not complete, and all but the last ``keep`` checkpoints."""
    complete = [path for path in checkpoints(root) if is_complete(path)]
    for path in checkpoints(root):
        if path not in complete[-max(1, keep) :]:
            (path / RECORD).unlink(missing_ok=True)  # first: half a folder must not look whole
            shutil.rmtree(path, ignore_errors=True)


def replace_folder(new: Path, target: Path) -> None:
    """Put a finished folder in a target's place.

    Raises:
        OSError: it cannot be done.
    """
    sync_tree(new)
    shutil.rmtree(target, ignore_errors=True)
    new.rename(target)
