"""One pass over the output's shards, in threads and without torch: their digests, and copied tensors bit by bit.

Every byte of the output is read once for both. While this goes on, torch can be imported, which takes as long as
reading several GiB.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from time import monotonic

from gqaconvert.checkpoint import dtypes
from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.headers import ShardHeader, TensorEntry
from gqaconvert.checkpoint.index import CheckpointIndex
from gqaconvert.sidecars import PROVENANCE
from gqaconvert.validation.record import Record
from gqaconvert.validation.shards import Buffer, Shards, first_difference
from gqaconvert.validation.types import Check, skipped, verdict

Advance = Callable[[int], None]

# Large pieces: an import that goes on beside lets go of the interpreter only every 5 ms, and a piece needs it thrice.
_PIECE = 16 * 2**20
_THREADS = 3


@dataclass
class _Result:
    """Of one shard: what it hashes to, and which of its tensors differ from the source, and how."""

    digest: str | None = None
    changed: dict[str, str] = field(default_factory=dict)
    hashing: float = 0.0
    comparing: float = 0.0


class Scan:
    """Hashes and comparisons of all shards, going on in threads between enter and exit."""

    def __init__(
        self,
        index: CheckpointIndex,
        record: Record,
        copied: Mapping[str, TensorEntry],
        source: Path | None,
        advance: Advance,
    ) -> None:
        """Prepare.

        Args:
            index: the output.
            record: its gqaconvert.json; the shards that this has hashes of are hashed.
            copied: tensors of the output that must be a source's tensor bit by bit.
            source: folder of the source, None if ``copied`` is empty.
            advance: told the bytes compared; called in threads.
        """
        self._recorded = record.hashes
        self._index, self._copied, self._source, self._advance = index, copied, source, advance
        self._pool = ThreadPoolExecutor(_THREADS)
        self._stop = Event()
        self._results: dict[str, Future[_Result]] = {}

    def __enter__(self) -> "Scan":
        for shard in self._index.shards:
            self._results[shard.shard] = self._pool.submit(self._scan, shard)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def changed(self) -> tuple[dict[str, str], float]:
        """Wait; the copied tensors that differ, each with where, and the seconds that it took all threads."""
        results = [result.result() for result in self._results.values()]
        faults = {name: fault for result in results for name, fault in result.changed.items()}
        return faults, sum(result.comparing for result in results)

    def hashes(self) -> Check:
        """Wait, and compare the digests with the record.

        Raises:
            StorageError: a file cannot be read.
        """
        name = "files.hashes"
        if not self._recorded:
            return skipped(name, f"no {PROVENANCE} with hashes")
        present = {shard.shard for shard in self._index.shards}
        faults = [f"{shard} is recorded and not there" for shard in self._recorded.keys() - present]
        faults += [f"{shard} is not in the record" for shard in present - self._recorded.keys()]
        seconds = 0.0
        for shard in present & self._recorded.keys():
            result = self._results[shard].result()
            seconds += result.hashing
            if result.digest != self._recorded[shard]:
                faults.append(f"{shard} has another SHA-256 than {PROVENANCE} says: changed, or of another run")
        good = f"{len(present)} file(s) have the hashes of {PROVENANCE}"
        bad = f"files are not those that {PROVENANCE} records"
        return verdict(name, sorted(faults), good, bad, seconds=seconds)

    def _scan(self, shard: ShardHeader) -> _Result:
        assert isinstance(self._index.files, LocalFolder)
        found = _Result()
        digest = hashlib.sha256() if shard.shard in self._recorded else None
        ours, theirs = Buffer(_PIECE), Buffer(_PIECE)
        with Shards(self._index.files.root) as output, Shards(self._source or Path()) as source:
            for tensor, entry, start, size in self._pieces(shard):
                if self._stop.is_set():
                    break
                begun = monotonic()
                compared = entry is not None and tensor not in found.changed
                if digest is not None or compared:
                    output.fill(shard.shard, start, ours.view[:size])
                if digest is not None:
                    digest.update(ours.view[:size])
                hashed = monotonic()
                found.hashing += hashed - begun
                if entry is not None:
                    if compared:
                        offset = start - self._index.entries[tensor].start
                        source.fill(entry.shard, entry.start + offset, theirs.view[:size])
                        place = first_difference(ours, theirs, size)
                        if place is not None:
                            found.changed[tensor] = _told(self._index.entries[tensor], offset + place)
                    self._advance(size)
                    found.comparing += monotonic() - hashed
        found.digest = None if digest is None else digest.hexdigest()
        return found

    def _pieces(self, shard: ShardHeader) -> Iterator[tuple[str, TensorEntry | None, int, int]]:
        """(name, source's tensor if the piece must be compared with one, first byte in the file, bytes)."""
        for start in range(0, shard.data_start, _PIECE):
            yield "", None, start, min(_PIECE, shard.data_start - start)
        for entry in shard.entries:
            source = self._copied.get(entry.name) if self._index.entries[entry.name] is entry else None
            for offset in range(0, entry.nbytes, _PIECE):
                yield entry.name, source, entry.start + offset, min(_PIECE, entry.nbytes - offset)


def _told(entry: TensorEntry, place: int) -> str:
    element = place * 8 // dtypes.BITS[entry.dtype]
    return f"{entry.name}: differs from the source, first at element {element:,} ({entry.shard})"
