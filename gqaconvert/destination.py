"""The folder that a command writes: where it may be, and what is said when it cannot be written."""

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.index import CheckpointIndex
from gqaconvert.errors import DestinationError, StorageError
from gqaconvert.sidecars import CONFIG


def located(destination: str | Path) -> Path:
    """The absolute path of a destination, its last part a name of its own (not ``..``) and not followed if a link."""
    if not str(destination):
        raise DestinationError("the destination is empty", hint="give a folder to create")
    path = Path(destination).expanduser().absolute()
    try:
        return path.resolve() if path.name == ".." else path.parent.resolve() / path.name
    except (OSError, RuntimeError) as error:
        raise DestinationError(f"{destination} is no place for a folder: {error}") from error


def check_destination(destination: Path, *, overwrite: bool) -> None:
    """Refuse destinations that would lose something.

    Raises:
        DestinationError: not a folder, not empty without ``overwrite``, or not a model folder with it.
    """
    if destination.is_symlink():
        raise DestinationError(f"{destination} is a link", hint="give the folder itself")
    if not destination.exists():
        return
    if not destination.is_dir():
        raise DestinationError(f"{destination} is a file")
    content = {path.name for path in destination.iterdir()}
    if not content:
        return
    if not overwrite:
        raise DestinationError(f"{destination} is not empty", hint="--overwrite replaces it, once the new one is whole")
    if CONFIG not in content or destination in (Path.cwd(), *Path.cwd().parents, Path.home()):
        raise DestinationError(
            f"{destination} is no model folder ({CONFIG} is missing, or it is a working folder): not replaced",
            hint="choose another destination",
        )


def refuse_overlap(folder: LocalFolder, index: CheckpointIndex, destination: Path) -> None:
    """Source and destination may not contain each other, nor may a source's shard lie in the destination by a link."""
    target = destination.resolve()
    places = [
        folder.root.resolve(),
        *(folder.path(shard.shard).resolve() for shard in index.shards),
    ]
    if any(place.is_relative_to(target) or target.is_relative_to(place) for place in places):
        raise DestinationError(
            f"source {folder.root} and destination {destination} overlap",
            hint="choose a destination outside the source",
        )


def free_bytes(destination: Path) -> int:
    """Free where a folder is, or would be."""
    folder = destination
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextmanager
def storage_errors(destination: Path, hint: str) -> Iterator[None]:
    """Turn an operating system's error into ours.

    Raises:
        StorageError: reading or writing failed.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"writing {destination} failed: {error.strerror or error}",
            hint=hint,
        ) from error


def json_bytes(document: Mapping[str, Any]) -> bytes:
    """A JSON file's content."""
    # Half a surrogate pair (JSON can escape one) goes out as it came in: backslashreplace writes JSON's own escape.
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode(errors="backslashreplace")
