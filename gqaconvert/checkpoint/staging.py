"""A folder that appears at once or not at all: it is built in a hidden sibling and renamed when it is whole.

PARENT/.NAME.gqaconvert/      the staging folder
    lock                      held while a run writes here
    state.json                fingerprint of the run, finished files with size and sha256
    model/                    becomes PARENT/NAME by one rename
    work/                     intermediate results, deleted in the end
    old/                      the folder that was there before, for as long as it takes to delete it
"""

import ctypes
import json
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from gqaconvert.checkpoint.writer import hash_file, sync_folder, sync_tree
from gqaconvert.errors import DestinationError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

_STATE = "state.json"


class Staging:
    """The staging folder of one destination, locked. Use as a context manager.

    On leaving with an error, the folder stays for a later ``resume``; `discard` removes it.
    """

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.folder = destination.parent / f".{destination.name}.gqaconvert"
        self.model = self.folder / "model"
        self.work = self.folder / "work"
        self._lock = FileLock(self.folder / "lock")
        self._state: dict[str, Any] = {}

    def __enter__(self) -> "Staging":
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise DestinationError(
                f"another run is writing to {self.destination} right now", hint="wait for it to end"
            ) from None
        except OSError as error:
            raise StorageError(f"cannot write beside {self.destination}: {error.strerror}") from error
        old = self.folder / "old"
        if old.exists():
            if self.destination.exists():  # killed while it was deleted
                shutil.rmtree(old)
            else:  # killed between two renames
                old.rename(self.destination)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.folder.exists():
            self._lock.release()
            return
        if not self.model.exists():
            self.discard()
        self._lock.release()

    @property
    def interrupted(self) -> bool:
        """Whether an earlier run left an unfinished model here."""
        return self.model.exists()

    @property
    def has_results(self) -> bool:
        """Whether anything was written that a later run could use."""
        return any(path.is_file() for folder in (self.model, self.work) for path in folder.rglob("*"))

    def begin(self, fingerprint: str, *, resume: bool) -> dict[str, str]:
        """Start a run, or continue the one that was interrupted.

        Returns:
            name within the staging folder -> sha256 of the finished files that may be trusted: their size and hash
            are as recorded.

        Raises:
            DestinationError: ``resume``, and what is here comes from another conversion.
        """
        finished: dict[str, dict[str, Any]] = {}
        if resume and self.interrupted:
            # No record at all: killed before the first one, so nothing is finished.
            self._state = {"fingerprint": fingerprint, "finished": {}}
            with suppress(OSError, ValueError):
                self._state = json.loads((self.folder / _STATE).read_text())
            if self._state["fingerprint"] != fingerprint:
                raise DestinationError(
                    f"the interrupted run in {self.folder} was another one: source, options or version have changed",
                    hint="--restart discards it and starts over",
                )
            finished = self._state["finished"]
        else:
            # The record first: a kill right after must not leave it to vouch for files that are gone.
            (self.folder / _STATE).unlink(missing_ok=True)
            for stale in (self.model, self.work):
                if stale.exists():
                    shutil.rmtree(stale)
        self.model.mkdir(exist_ok=True)
        self.work.mkdir(exist_ok=True)
        trusted = {name: record for name, record in finished.items() if self._as_recorded(name, record)}
        self._state = {"fingerprint": fingerprint, "finished": trusted}
        self._save()
        for path in (*self.model.rglob("*"), *self.work.rglob("*")):
            if path.is_file() and path.relative_to(self.folder).as_posix() not in trusted:
                path.unlink()
        return {name: record["sha256"] for name, record in trusted.items()}

    def _as_recorded(self, name: str, record: dict[str, Any]) -> bool:
        path = self.folder / name
        return path.is_file() and path.stat().st_size == record["nbytes"] and hash_file(path) == record["sha256"]

    def record(self, name: str, sha256: str) -> None:
        """A file is finished."""
        self._state["finished"][name] = {"nbytes": (self.folder / name).stat().st_size, "sha256": sha256}
        self._save()

    def _save(self) -> None:
        temporary = self.folder / f"{_STATE}.new"
        temporary.write_text(json.dumps(self._state))
        temporary.replace(self.folder / _STATE)

    def commit(self) -> None:
        """Make the finished folder appear under its name; what was there before disappears in the same moment."""
        # All at once and only now: until here nothing relies on it, as a resumed run trusts hashes, and an fsync in
        # between would wait for the shards as well (ext4 orders a small file behind what was written before it).
        sync_tree(self.model)
        parent = self.destination.parent
        if self.destination.is_dir() and not any(self.destination.iterdir()):
            self.destination.rmdir()
        if self.destination.exists():
            old = self.folder / "old"
            if _exchange(self.model, self.destination):
                self.model.rename(old)
            else:
                self.destination.rename(old)
                self.model.rename(self.destination)
        else:
            self.model.rename(self.destination)
        sync_folder(parent)
        self.discard()

    def discard(self) -> None:
        """Remove the staging folder and all that is in it."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step, where the system can (Linux: renameat2 with RENAME_EXCHANGE)."""
    if not sys.platform.startswith("linux"):
        return False
    renameat2: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, exchange = -100, 2
    return renameat2 is not None and renameat2(at_cwd, os.fsencode(first), at_cwd, os.fsencode(second), exchange) == 0
