"""Where a checkpoint's files are: a local folder, or a repository of the Hub of which only headers travel."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Protocol

from gqaconvert.checkpoint import headers
from gqaconvert.checkpoint.headers import ShardHeader
from gqaconvert.errors import CheckpointError, StorageError

MAX_JSON_BYTES = 64 * 2**20


class CheckpointFiles(Protocol):
    """A listing of files that can be read as small text and as safetensors headers."""

    @property
    def label(self) -> str:
        """What the user called it: a path or a repository id."""

    @property
    def revision(self) -> str | None:
        """Commit of the repository, None for a plain folder."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Relative name (posix) -> bytes, of every file."""

    def read_bytes(self, name: str) -> bytes:
        """A small file, whole."""

    def read_header(self, name: str) -> ShardHeader:
        """The checked header of one safetensors file."""


@dataclass(frozen=True)
class LocalFolder:
    """A folder on disk. It may be a snapshot of the Hub's cache, whose files are links to blobs."""

    root: Path
    label: str
    revision: str | None = None
    repo_id: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def open(cls, root: Path, *, label: str | None = None, repo_id: str | None = None) -> "LocalFolder":
        """List the folder.

        Raises:
            CheckpointError: a file that is a dangling link.
            StorageError: the folder cannot be read.
        """
        sizes: dict[str, int] = {}
        try:
            for folder, subfolders, names in os.walk(root, onerror=_fail):
                subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
                for name in sorted(names):
                    path = Path(folder, name)
                    if path.is_symlink() and not path.exists():
                        raise CheckpointError(
                            f"{path} is a link to a file that does not exist",
                            hint="fetch the checkpoint again",
                        )
                    if path.is_file():
                        sizes[PurePosixPath(path.relative_to(root)).as_posix()] = path.stat().st_size
        except OSError as error:
            raise StorageError(f"cannot read {root}: {error.strerror}") from error
        revision = root.name if root.parent.name == "snapshots" else None
        return cls(root, label or str(root), revision, repo_id or _cached_repo(root), sizes)

    def path(self, name: str) -> Path:
        """Absolute path of a listed file."""
        return self.root / name

    def stamp(self, name: str) -> tuple[int, int]:
        """Size and time of the last change (ns): tells whether a file is still the same without reading it."""
        status = self.path(name).stat()
        return status.st_size, status.st_mtime_ns

    def read_bytes(self, name: str) -> bytes:
        """A small file, whole.

        Raises:
            CheckpointError: it is far too large to be what it should be.
            StorageError: it cannot be read.
        """
        refuse_large(name, self.sizes[name])
        try:
            return self.path(name).read_bytes()
        except OSError as error:
            raise StorageError(f"cannot read {self.path(name)}: {error.strerror}") from error

    def read_header(self, name: str) -> ShardHeader:
        """The checked header of one safetensors file; costs two small reads."""
        try:
            with self.path(name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = headers.header_length(file.read(headers.LENGTH_BYTES), shard=name)
                if headers.LENGTH_BYTES + length > size:
                    raise CheckpointError(
                        f"{name} is cut off inside its header, or is not a safetensors file",
                        hint=headers.FETCH_HINT,
                    )
                return headers.parse_header(file.read(length), shard=name, file_size=size)
        except OSError as error:
            raise StorageError(f"cannot read {self.path(name)}: {error.strerror}") from error


def _fail(error: OSError) -> None:
    raise error


def refuse_large(name: str, nbytes: int) -> None:
    """Refuse to read a file whole that is far too large for what it should be.

    Raises:
        CheckpointError: it is.
    """
    if nbytes > MAX_JSON_BYTES:
        raise CheckpointError(f"{name} has {nbytes:,} bytes: far too many for such a file of a checkpoint")


def _cached_repo(root: Path) -> str | None:
    """Repository id of a snapshot folder in the Hub's cache: models--ORG--NAME/snapshots/COMMIT."""
    folder = root.parent.parent.name
    in_cache = root.parent.name == "snapshots" and folder.startswith("models--")
    return folder.removeprefix("models--").replace("--", "/") if in_cache else None
