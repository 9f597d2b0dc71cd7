"""The table of all tensors of a checkpoint, from the shards' headers, checked against the index file both ways."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from gqaconvert.checkpoint import headers
from gqaconvert.checkpoint.files import CheckpointFiles
from gqaconvert.checkpoint.headers import ShardHeader, TensorEntry
from gqaconvert.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_NESTING = 64


class Problem(NamedTuple):
    """Something about a checkpoint that a person should know. Errors forbid a conversion, warnings do not."""

    severity: Literal["error", "warning"]
    code: str
    subject: str
    message: str


@dataclass(frozen=True)
class CheckpointIndex:
    """All tensors of a checkpoint, in file order, and what was found wrong with its files."""

    files: CheckpointFiles
    shards: tuple[ShardHeader, ...]
    entries: Mapping[str, TensorEntry]
    index_file: str | None
    problems: tuple[Problem, ...]

    @property
    def total_size(self) -> int:
        """Bytes of all tensors: what ``metadata.total_size`` of an index has to say."""
        return sum(shard.data_bytes for shard in self.shards)


def read_index(files: CheckpointFiles) -> CheckpointIndex:
    """Read every shard's header and compare with the index file.

    Raises:
        CheckpointError: no shard is readable, the index is not one, or it names a path instead of a file.
    """
    problems: list[Problem] = []
    index_file, weight_map, declared_size = _find_index(files, problems)
    shard_names = sorted(set(weight_map.values()))
    missing = [name for name in shard_names if name not in files.sizes]
    if missing:
        problems.append(
            Problem("error", "missing-shard", index_file or "", f"{_some(missing)} named, but not in the folder")
        )
    shards = _read_shards(files, [name for name in shard_names if name in files.sizes], problems)
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        for entry in shard.entries:
            if entry.name in entries:
                where = f"{entries[entry.name].shard} and {shard.shard}"
                problems.append(Problem("error", "duplicate-tensor", entry.name, f"stored twice, in {where}"))
            entries[entry.name] = entry
    index = CheckpointIndex(files, tuple(shards), entries, index_file, ())
    if index_file is not None:
        _compare(index, weight_map, declared_size, {shard.shard for shard in shards}, problems)
    _stray_files(files, set(shard_names), problems)
    return CheckpointIndex(files, tuple(shards), entries, index_file, tuple(problems))


def _find_index(files: CheckpointFiles, problems: list[Problem]) -> tuple[str | None, dict[str, str], Any]:
    """The index file's name, its weight_map, its total_size. Without one, the map holds shards under dummy keys."""
    top = [name for name in files.sizes if "/" not in name]
    indices = [name for name in top if name.endswith(".safetensors.index.json")]
    index_file = INDEX_FILE if INDEX_FILE in indices else indices[0] if len(indices) == 1 else None
    if SINGLE_FILE in top:
        if index_file is not None:
            problems.append(
                Problem(
                    "warning",
                    "two-sources",
                    index_file,
                    f"ignored: {SINGLE_FILE} is there too, loaders take that",
                )
            )
        return None, {"": SINGLE_FILE}, None
    if index_file is not None:
        return index_file, *_parse_index(files, index_file)
    if indices:
        raise CheckpointError(f"several index files: {_some(indices)}", hint=f"keep one, named {INDEX_FILE}")
    return None, _shards_without_index(top, problems), None


def _parse_index(files: CheckpointFiles, name: str) -> tuple[dict[str, str], Any]:
    document = read_json(files, name)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{name} has no weight_map")
    for shard in {name if isinstance(name, str) else repr(name)[:80] for name in weight_map.values()}:
        if re.fullmatch(r"[^/\\\x00]+\.safetensors", shard) is None or shard.startswith("."):
            raise CheckpointError(
                f"{name} names {shard!r} as a shard: only plain *.safetensors file names are accepted",
                hint="shards lie beside their index; a path in it is damage or an attack",
            )
    metadata = document.get("metadata")
    return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None


def _shards_without_index(top: list[str], problems: list[Problem]) -> dict[str, str]:
    """Shards whose numbering is complete, or the only file there is."""
    found = [name for name in top if name.endswith(".safetensors") and name != "adapter_model.safetensors"]
    numbered = {name: match for name in found if (match := re.search(r"(\d{5})-of-(\d{5})", name))}
    if numbered:
        counts = {int(match[2]) for match in numbered.values()}
        numbers = sorted(int(match[1]) for match in numbered.values())
        if len(counts) != 1 or numbers != list(range(1, max(counts) + 1)):
            raise CheckpointError(
                f"no {INDEX_FILE}, and the shards' numbers are not complete: {_some(sorted(numbered))}",
                hint="fetch the checkpoint again",
            )
        problems.append(Problem("warning", "no-index", INDEX_FILE, "missing; rebuilt from the shards' headers"))
        return {name: name for name in numbered}
    if len(found) == 1:
        problems.append(Problem("warning", "file-name", found[0], f"loaders look for {SINGLE_FILE}"))
        return {found[0]: found[0]}
    raise CheckpointError(
        f"no {SINGLE_FILE} and no {INDEX_FILE}; cannot tell which of {_some(sorted(found))} belong together"
    )


def _read_shards(files: CheckpointFiles, names: Iterable[str], problems: list[Problem]) -> list[ShardHeader]:
    shards: list[ShardHeader] = []
    first_error: CheckpointError | None = None
    for name in names:
        try:
            shards.append(files.read_header(name))
        except CheckpointError as error:
            first_error = first_error or error
            problems.append(Problem("error", "bad-shard", name, error.message))
    if not shards:
        raise first_error or CheckpointError("none of the shards that the index names is there")
    return shards


def _compare(
    index: CheckpointIndex,
    weight_map: Mapping[str, str],
    declared_size: object,
    read: set[str],
    problems: list[Problem],
) -> None:
    subject = index.index_file or ""
    names = index.entries.keys()
    lost = [name for name in weight_map.keys() - names if weight_map[name] in read]
    if lost:
        problems.append(Problem("error", "missing-tensor", subject, f"names {_some(sorted(lost))}: in no shard"))
    unlisted = names - weight_map.keys()
    if unlisted:
        problems.append(Problem("warning", "unlisted-tensor", subject, f"does not name {_some(sorted(unlisted))}"))
    moved = [name for name in names & weight_map.keys() if weight_map[name] != index.entries[name].shard]
    if moved:
        problems.append(Problem("error", "wrong-shard", subject, f"puts {_some(sorted(moved))} into the wrong shard"))
    if declared_size is not None and declared_size != index.total_size and not lost and len(read) == len(index.shards):
        message = f"metadata.total_size is {str(declared_size)[:80]}, the tensors have {index.total_size} bytes"
        problems.append(Problem("warning", "total-size", subject, message))


def _stray_files(files: CheckpointFiles, used: set[str], problems: list[Problem]) -> None:
    stray = [name for name in files.sizes if name.endswith(".safetensors") and name not in used]
    if stray:
        message = f"{_some(sorted(stray))}: not part of the checkpoint, not read and not carried over"
        problems.append(Problem("warning", "stray-weights", stray[0], message))


def read_json(files: CheckpointFiles, name: str) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint.

    Raises:
        CheckpointError: it is missing, or no JSON object, or nested beyond all sense.
        UnsupportedFormatError: it is a Git LFS pointer.
    """
    if name not in files.sizes:
        raise CheckpointError(f"{files.label} has no {name}")
    content = files.read_bytes(name)
    headers.refuse_other_magic(content[: headers.LENGTH_BYTES], name=name)
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{name} is not a JSON object")
    if _nested_beyond(document, _MAX_NESTING):
        raise CheckpointError(f"{name} is nested more than {_MAX_NESTING} levels deep: no file of a checkpoint")
    return document


def _nested_beyond(document: object, limit: int) -> bool:
    """Whether containers lie deeper in each other than ``limit``; does not recurse itself."""
    level = [document]
    for _ in range(limit):
        level = [
            child
            for value in level
            for child in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True


def _some(names: list[str], limit: int = 3) -> str:
    """The first few names, and how many more."""
    shown = ", ".join(repr(name) if len(name) < 120 else repr(name[:117] + "...") for name in list(names)[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit:,} more"
