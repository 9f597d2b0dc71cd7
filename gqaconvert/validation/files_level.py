"""Is the file right? Headers, JSON and a streaming comparison of every byte; no model is run.

At most a few slices are in memory: 16 MiB of each side in every thread for what is copied, a few MiB in float64 for
what is computed.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gqaconvert.checkpoint import dtypes
from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.headers import TensorEntry
from gqaconvert.checkpoint.index import CheckpointIndex
from gqaconvert.inspection import read_checkpoint
from gqaconvert.sidecars import CONFIG, PROVENANCE, output_name, plan_sidecars
from gqaconvert.validation.pair import Pair, stored_type
from gqaconvert.validation.record import Record, read_record
from gqaconvert.validation.scan import Scan
from gqaconvert.validation.shards import Buffer, Shards, first_difference
from gqaconvert.validation.types import Check, TensorError, skipped, timed, verdict

Advance = Callable[[int], None]
_CHUNK = 4 * 2**20


def validate_files(pair: Pair, advance: Advance) -> tuple[list[Check], list[TensorError]]:
    """All checks of the files level, with a source to compare with.

    Raises:
        StorageError: a file cannot be read.
    """
    sound = comparable(pair)
    merged = pair.merged_names()
    kept = sound - pair.trained_names()
    copied = {
        tensor.name: tensor.source
        for tensor in pair.expected
        if tensor.kind == "untouched"
        and tensor.name in kept
        and tensor.name not in merged
        and tensor.dtype == pair.index.entries[tensor.name].dtype
    }
    with Scan(pair.index, pair.record, copied, pair.source_folder.root, advance) as scan:
        checks = [
            timed(lambda: _index(pair.index)),
            timed(lambda: _config(pair)),
            *_structure(pair),
            timed(lambda: _sidecars(pair)),
            timed(lambda: tied(pair.index, pair.config.raw)),
        ]
        from gqaconvert.validation.compare import compare_tensors

        compared, errors = compare_tensors(pair, kept, copied.keys(), scan, advance)
        if pair.record.trained is not None:
            compared.append(timed(lambda: _finite(pair.index, pair.folder, advance)))
        return [*checks, *compared, scan.hashes(), timed(lambda: _record(pair))], errors


def validate_alone(folder: LocalFolder, advance: Advance, *, family: str | None = None) -> list[Check]:
    """What can be said of an output whose source is gone.

    Raises:
        CheckpointError: it is no readable checkpoint.
        StorageError: a file cannot be read.
    """
    checkpoint = read_checkpoint(folder, family=family)
    record = read_record(folder)
    with Scan(checkpoint.index, record, {}, None, advance) as scan:
        obstacle = [] if checkpoint.obstacle is None else [checkpoint.obstacle.message]
        return [
            _index(checkpoint.index),
            verdict("files.config", obstacle, "config.json fits the weights", "config.json does not fit the weights"),
            timed(lambda: tied(checkpoint.index, checkpoint.config.raw)),
            timed(lambda: _finite(checkpoint.index, folder, advance)),
            scan.hashes(),
            _record_alone(record),
            skipped("files.untouched", "no source to compare with"),
            skipped("files.pooled-weights", "no source to compute them from"),
        ]


def _finite(index: CheckpointIndex, folder: LocalFolder, advance: Advance) -> Check:
    from gqaconvert.finite import find_non_finite

    found = find_non_finite(index, folder, advance)
    faults = [f"{problem.subject}: {problem.message}" for problem in found if problem.severity == "error"]
    return verdict("files.finite", faults, "all numbers are finite", "numbers that are not finite")


def comparable(pair: Pair) -> frozenset[str]:
    """Expected tensors whose place in the output has the right shape and type."""
    return frozenset(
        tensor.name
        for tensor in pair.expected
        if (entry := pair.index.entries.get(tensor.name)) is not None
        and entry.shape == tensor.shape
        and entry.dtype == stored_type(pair, tensor)
    )


def _index(index: CheckpointIndex) -> Check:
    # What a conversion takes with a warning, its output must not have.
    faults = [f"{problem.subject}: {problem.message}" for problem in index.problems]
    good = f"{len(index.entries)} tensors in {len(index.shards)} file(s), index and total_size agree"
    return verdict("files.index", faults, good, "index and shards contradict each other", total_size=index.total_size)


def _config(pair: Pair) -> Check:
    faults = [f"{CONFIG}: {line}" for line in _differences(pair.expected_config(), dict(pair.config.raw))]
    declared = ", ".join(f"{key}: {value}" for key, value in pair.config_changes.items()) or "nothing"
    good = f"the source's {CONFIG} with {declared} changed and nothing else"
    return verdict("files.config", faults, good, f"{CONFIG} is not the source's with {declared} changed")


def _differences(expected: Any, found: Any, path: str = "") -> Iterator[str]:  # noqa: ANN401
    if isinstance(expected, dict) and isinstance(found, dict):
        for key in sorted(expected.keys() | found.keys()):
            place = f"{path}.{key}" if path else str(key)
            if key not in found:
                yield f"{place} is missing, expected {json.dumps(expected[key])[:80]}"
            elif key not in expected:
                yield f"{place} is {json.dumps(found[key])[:80]}, the source has no such key"
            else:
                yield from _differences(expected[key], found[key], place)
    elif expected != found or isinstance(expected, bool) != isinstance(found, bool):
        yield f"{path} is {json.dumps(found)[:80]}, expected {json.dumps(expected)[:80]}"


def _structure(pair: Pair) -> list[Check]:
    expected, found = {tensor.name: tensor for tensor in pair.expected}, pair.index.entries
    faults = [f"missing: {name}" for name in expected if name not in found]
    faults += [f"not expected: {name}" for name in found if name not in expected]
    names = verdict("files.tensors", faults, f"all {len(expected)} tensors, nothing extra", "tensors missing or extra")
    wrong = []
    for name in expected.keys() & found.keys():
        wanted = f"{stored_type(pair, expected[name])} {list(expected[name].shape)}"
        actual = f"{found[name].dtype} {list(found[name].shape)}"
        if actual != wanted:
            wrong.append(f"{name}: {actual}, expected {wanted}")
    wrong.sort()
    good = f"every shape and type is that of {pair.kv_heads} KV heads"
    return [names, verdict("files.shapes", wrong, good, f"{len(wrong)} tensors of a wrong shape or type")]


def _sidecars(pair: Pair) -> Check:
    source, folder = pair.source_folder, pair.folder
    names, faults = plan_sidecars(pair.source.index).names, []
    for name in names:
        carried = output_name(name)
        if carried not in folder.sizes:
            faults.append(f"{carried} is missing")
        elif not _same(source.path(name), folder.path(carried)):
            faults.append(f"{carried} is not the source's")
    good = f"{len(names)} files beside the weights, all the source's"
    return verdict("files.sidecars", faults, good, "files beside the weights are missing or changed")


def _same(left: Path, right: Path) -> bool:
    if left.stat().st_size != right.stat().st_size:
        return False
    with left.open("rb") as one, right.open("rb") as other:
        while data := one.read(_CHUNK):
            if data != other.read(_CHUNK):
                return False
    return True


def tied(index: CheckpointIndex, config: Mapping[str, Any]) -> Check:
    """Whether a stored output layer contradicts the embedding that config.json ties it to."""
    name = "files.tied-embeddings"
    text = config.get("text_config")
    flag = config.get("tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None)
    heads = [entry for key, entry in index.entries.items() if key.split(".")[-2:] == ["lm_head", "weight"]]
    embeddings = [
        e for key, e in index.entries.items() if key.endswith(("embed_tokens.weight", "word_embeddings.weight"))
    ]
    if not flag or not heads or len(embeddings) != 1:
        return Check(name, "passed", "no output layer that could contradict the embedding")
    same = _same_bytes(index, heads[0], embeddings[0])
    faults = [] if same else [f"{heads[0].name} differs from {embeddings[0].name}, and config.json ties the two"]
    return verdict(
        name, faults, "the stored output layer is the embedding", "loaders would drop the stored output layer"
    )


def _same_bytes(index: CheckpointIndex, left: TensorEntry, right: TensorEntry) -> bool:
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    assert isinstance(index.files, LocalFolder)
    one, other = Buffer(_CHUNK), Buffer(_CHUNK)
    with Shards(index.files.root) as shards:
        for start in range(0, left.nbytes, _CHUNK):
            size = min(_CHUNK, left.nbytes - start)
            shards.fill(left.shard, left.start + start, one.view[:size])
            shards.fill(right.shard, right.start + start, other.view[:size])
            if first_difference(one, other, size) is not None:
                return False
    return True


def _record_alone(record: Record) -> Check:
    if not record.present:
        return skipped("files.record", f"no {PROVENANCE}: not made by gqaconvert")
    return verdict("files.record", record.faults, f"{PROVENANCE} is whole", f"{PROVENANCE} is damaged")


def _record(pair: Pair) -> Check:
    name, record = "files.record", pair.record
    if not record.present:
        return skipped(name, f"no {PROVENANCE}: not made by gqaconvert; taken for a mean")
    geometry = pair.source.sites[0].geometry
    facts: tuple[tuple[str, object, object], ...] = (
        ("num_key_value_heads of the recipe", record.num_key_value_heads, pair.kv_heads),
        ("num_key_value_heads of the result", record.result.get("num_key_value_heads"), pair.kv_heads),
        ("total_size of the result", record.result.get("total_size"), _stored_size(pair)),
        ("num_key_value_heads of the source", record.source.get("num_key_value_heads"), geometry.num_key_value_heads),
        ("num_attention_heads of the source", record.source.get("num_attention_heads"), geometry.num_attention_heads),
        ("total_size of the source", record.source.get("total_size"), pair.source.index.total_size),
    )
    faults = [f"{PROVENANCE}: {what} is {json.dumps(said)[:80]}, found {actual}"
              for what, said, actual in facts if said != actual]  # fmt: skip
    good = f"{PROVENANCE} describes these two folders"
    bad = f"{PROVENANCE} is damaged" if record.faults else f"{PROVENANCE} describes other folders"
    return verdict(name, record.faults or faults, good, bad)


def _stored_size(pair: Pair) -> int:
    """Bytes that the expected tensors take: what total_size should be, whatever the files hold."""
    import math

    return sum(dtypes.nbytes(stored_type(pair, tensor), math.prod(tensor.shape)) for tensor in pair.expected)
