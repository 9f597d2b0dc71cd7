"""Write the planned shards, several things at a time.

    copier (thread)      puts unchanged byte ranges where they belong and leaves the places of computed ones open; a
                         second one asks the kernel to write them out
    main thread          fills those places, in order, as soon as torch is there; a few threads compute ahead for it
    followers (threads)  hash what is complete (checkpoint/writer.py)

The copier is ahead by at most what fits its queue. So torch's import and the pooling cost no time beside the copying,
the hash finds its bytes in the page cache, and a run that is killed loses little.
"""

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Full, Queue
from threading import Event
from typing import NamedTuple

from gqaconvert.checkpoint import dtypes
from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.staging import Staging
from gqaconvert.checkpoint.writer import CHUNK, Advance, FileFinisher, copy_range, start_writeback, write_at
from gqaconvert.merge import pooling_of
from gqaconvert.planning import ByteRange, CastPiece, ConversionPlan, CopyPiece, PlannedShard, PoolPiece, TurnPiece
from gqaconvert.reading import SourceReader

_CAST_CHUNK = 8 * 2**20
_AHEAD = 2 * 2**30
"""Bytes that the copier may be ahead."""
_COMPUTING = min(4, os.cpu_count() or 1)
"""Threads that compute. Their results wait in memory, a head each."""

Computed = PoolPiece | CastPiece | TurnPiece
Step = Callable[[], list[memoryview]]


class Run(NamedTuple):
    """Bytes of the output, one after the other, that are all copied from one place or all computed.

    Attributes:
        start: place in the output file.
        nbytes: of the output.
        source: where to copy from, None if computed.
        computed: the pieces, each with its type in the output.
    """

    start: int
    nbytes: int
    source: ByteRange | None
    computed: tuple[tuple[str, Computed], ...] = ()


def write_shards(
    plan: ConversionPlan, folder: LocalFolder, staging: Staging, finished: dict[str, str], advance: Advance
) -> None:
    """Write every shard that is not in ``finished`` (name -> sha256), and add it there and to the staging's record.

    Raises:
        CheckpointError: values that are not finite, or a source that became shorter.
        OSError: reading or writing fails.
    """
    pending: list[tuple[str, Future[str]]] = []

    def collect(*, wait: bool) -> None:
        while pending and (wait or pending[0][1].done()):
            name, future = pending.pop(0)
            finished[name] = future.result()
            staging.record(f"model/{name}", finished[name])

    todo = [shard for shard in plan.shards if shard.name not in finished]
    advance(sum(shard.nbytes for shard in plan.shards if shard.name in finished))
    with (
        FileFinisher() as finisher,
        SourceReader(folder, staging.folder) as sources,
        _Copier(todo, folder, staging) as copied,
        ThreadPoolExecutor(_COMPUTING, thread_name_prefix="compute") as computing,
    ):
        try:
            for shard in todo:
                run = copied.next()  # the file exists from now on
                path = staging.model / shard.name
                with path.open("r+b", buffering=0) as file, finisher.follow(path) as follower:
                    position = 0
                    while True:
                        for nbytes in _fill(plan, run, sources, file.fileno(), computing):
                            position += nbytes
                            follower.written_to(position)
                            advance(nbytes)
                        if position == shard.nbytes:
                            break
                        run = copied.next()
                pending.append((shard.name, follower.digest))
                collect(wait=False)
        finally:
            # Also on the way out with an error: whole shards are what --resume starts from.
            collect(wait=True)


def _fill(
    plan: ConversionPlan, run: Run, sources: SourceReader, target: int, computing: ThreadPoolExecutor
) -> Iterator[int]:
    """Compute a run, if it is not there already; gives the number of bytes step by step."""
    if not run.computed:
        yield run.nbytes
        return
    from gqaconvert.merge.execute import one_thread

    position = run.start
    steps = (step for dtype, piece in run.computed for step in _steps(plan, dtype, piece, sources))
    with one_thread():
        for data in _in_order(computing, steps):
            position += write_at(target, data, position)
            yield len(data)


def _in_order(computing: ThreadPoolExecutor, steps: Iterator[Step]) -> Iterator[memoryview]:
    """The results of all steps, one after the other, while the next ones are being computed."""
    pending: deque[Future[list[memoryview]]] = deque()
    try:
        for step in steps:
            pending.append(computing.submit(step))
            if len(pending) > _COMPUTING:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def _steps(plan: ConversionPlan, dtype: str, piece: Computed, sources: SourceReader) -> Iterator[Step]:
    """A piece as calls that do not depend on each other."""
    from gqaconvert.merge.execute import cast, pool_heads, turned

    if isinstance(piece, TurnPiece):
        parts = [part for part in piece.pieces if not isinstance(part, CopyPiece)]
        assert len(parts) == len(piece.pieces), "columns of a stored matrix are never copied as they are"
        steps = [step for part in parts for step in _steps(plan, dtype, part, sources)]
        yield lambda: [turned(b"".join(data for step in steps for data in step()), dtype, piece.rows, piece.row_size)]
        return
    if isinstance(piece, CastPiece):
        for offset in range(0, piece.source.nbytes, _CAST_CHUNK):
            count = min(_CAST_CHUNK, piece.source.nbytes - offset)
            yield lambda offset=offset, count=count: [  # type: ignore[misc]
                cast(sources.read(piece.source, offset, count), piece.source_dtype, dtype, piece.name)
            ]
        return
    yield lambda: list(
        pool_heads(
            [lambda offset, count, place=place: sources.read(place, offset, count) for place in piece.sources],  # type: ignore[misc]
            shape=(piece.rows, piece.row_size),
            source_dtype=piece.source_dtype,
            target_dtype=dtype,
            pooling=pooling_of(plan.recipe.method),
            role=piece.role,
            key=piece.key,
            seed=plan.recipe.seed,
            initializer_range=plan.initializer_range,
        )
    )


class _Copier:
    """The thread that copies; a context manager that ends it."""

    def __init__(self, shards: list[PlannedShard], folder: LocalFolder, staging: Staging) -> None:
        self._shards, self._folder, self._staging = shards, folder, staging
        self._queue: Queue[Run | None] = Queue(maxsize=_AHEAD // CHUNK)
        self._stop = Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="copy")
        self._flusher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="flush")

    def __enter__(self) -> "_Copier":
        self._copied = self._pool.submit(self._copy)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown(wait=True)
        self._flusher.shutdown(wait=True, cancel_futures=True)

    def next(self) -> Run:
        """The next run in the order of the files, copied already if it is one that is copied.

        Raises:
            CheckpointError: the source became shorter.
            OSError: reading or writing fails.
        """
        run = self._queue.get()
        if run is None:
            self._copied.result()
            raise AssertionError("asked for more than the plan has")
        return run

    def _copy(self) -> None:
        try:
            with SourceReader(self._folder, self._staging.folder) as sources:
                for shard in self._shards:
                    path = self._staging.model / shard.name
                    with path.open("wb", buffering=0) as file:
                        self._copy_shard(shard, path, file.fileno(), sources)
        finally:
            self._tell(None)

    def _copy_shard(self, shard: PlannedShard, path: Path, target: int, sources: SourceReader) -> None:
        self._tell(Run(0, write_at(target, shard.header, 0), None))
        for run in runs(shard):
            if self._stop.is_set():
                return
            if run.source is None:
                self._tell(run)
                continue
            position, place = run.start, run.source
            for count in copy_range(sources.descriptor(place.shard), place.start, target, position, place.nbytes):
                self._tell(Run(position, count, place))
                self._flusher.submit(start_writeback, path, position, count)
                position += count

    def _tell(self, run: Run | None) -> None:
        while not self._stop.is_set():
            with suppress(Full):
                self._queue.put(run, timeout=0.1)
                return


def runs(shard: PlannedShard) -> Iterator[Run]:
    """The data of a shard in order; neighbours that are copied from one place are one run, computed ones too."""
    position = len(shard.header)
    place: ByteRange | None = None
    computed: list[tuple[str, Computed]] = []
    nbytes = 0

    def collected() -> Iterator[Run]:
        nonlocal position, place, nbytes
        if nbytes:
            yield Run(position, nbytes, place, tuple(computed))
        position, place, nbytes = position + nbytes, None, 0
        computed.clear()

    for tensor in shard.tensors:
        for piece in tensor.pieces:
            if isinstance(piece, CopyPiece):
                source = piece.source
                if place is None or (place.shard, place.start + nbytes) != (source.shard, source.start):
                    yield from collected()
                    place = source
                nbytes += source.nbytes
                place = place._replace(nbytes=nbytes)
            else:
                if place is not None or nbytes > CHUNK:
                    yield from collected()
                computed.append((tensor.dtype, piece))
                nbytes += dtypes.nbytes(tensor.dtype, piece.numel)
    yield from collected()
