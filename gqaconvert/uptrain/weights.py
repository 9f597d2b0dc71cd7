"""The trained weights in the files and types of the model that was trained."""

from collections.abc import Iterator
from pathlib import Path

from gqaconvert.checkpoint import dtypes
from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.headers import TensorEntry, build_header
from gqaconvert.checkpoint.index import CheckpointIndex
from gqaconvert.checkpoint.writer import Advance, hash_file
from gqaconvert.errors import CheckpointError

_CHUNK = 8 * 2**20
"""Bytes of float32 at a time."""


def write_weights(base: CheckpointIndex, trained: CheckpointIndex, target: Path, advance: Advance) -> dict[str, str]:
    """Write the base's shards with trained values, each tensor in the type it has there; name -> sha256.

    A tensor that the trained model does not have keeps the base's bytes (a buffer that the class computes), unless the
    base stores it twice: then it is tied, and stays the same as its twin.

    Raises:
        CheckpointError: a value is not finite, or shapes differ.
        OSError: reading or writing fails.
    """
    digests = {}
    for shard in base.shards:
        table = [(entry.name, entry.dtype, entry.shape) for entry in shard.entries]
        path = target / shard.shard
        with path.open("wb") as file:
            file.write(build_header(table, shard.metadata))
            for entry in shard.entries:
                for data in _values(entry, base, trained):
                    file.write(data)
                    advance(len(data))
        digests[shard.shard] = hash_file(path)
    return digests


def _values(entry: TensorEntry, base: CheckpointIndex, trained: CheckpointIndex) -> Iterator[bytes | memoryview]:
    from gqaconvert.merge.execute import cast

    found = trained.entries.get(entry.name) or _twin(entry, base, trained)
    if found is None or entry.dtype not in dtypes.TORCH_NAMES:
        yield from _read(base, entry)
        return
    if found.shape != entry.shape:
        raise CheckpointError(f"{entry.name} was trained as {list(found.shape)}, and is {list(entry.shape)}")
    for data in _read(trained, found):
        yield cast(bytearray(data), found.dtype, entry.dtype, entry.name)


def _twin(entry: TensorEntry, base: CheckpointIndex, trained: CheckpointIndex) -> TensorEntry | None:
    for other in base.entries.values():
        same = other.name != entry.name and (other.shape, other.dtype) == (entry.shape, entry.dtype)
        if same and other.name in trained.entries and all(
            one == two for one, two in zip(_read(base, entry), _read(base, other), strict=True)
        ):  # fmt: skip
            return trained.entries[other.name]
    return None


def _read(index: CheckpointIndex, entry: TensorEntry) -> Iterator[bytes]:
    folder = index.files
    assert isinstance(folder, LocalFolder)
    with folder.path(entry.shard).open("rb") as file:
        file.seek(entry.start)
        left = entry.nbytes
        while left:
            data = file.read(min(left, _CHUNK))
            if not data:
                raise CheckpointError(f"{entry.shard} became shorter while it was read")
            yield data
            left -= len(data)
