"""Every number of the output against the source: copied ones bit by bit, computed ones recomputed in float64."""

import math
from collections.abc import Callable, Collection, Iterator
from time import monotonic

import torch
from torch import Tensor

from gqaconvert.validation.numbers import Deviation, nearest, slices
from gqaconvert.validation.pair import Pair
from gqaconvert.validation.rows import ExpectedTensor, Segment
from gqaconvert.validation.scan import Scan
from gqaconvert.validation.shards import Buffer, Shards
from gqaconvert.validation.types import Check, TensorError, skipped, verdict

Advance = Callable[[int], None]
KINDS = ("untouched", "weights", "biases", "norms")


def compare_tensors(
    pair: Pair, comparable: frozenset[str], copied: Collection[str], scan: Scan, advance: Advance
) -> tuple[list[Check], list[TensorError]]:
    """The checks of the numbers, for tensors whose shape and type are right; those ``copied`` are left to the scan.

    Raises:
        StorageError: a file cannot be read.
    """
    faults: dict[str, list[str]] = {kind: [] for kind in KINDS}
    counts, seconds = dict.fromkeys(KINDS, 0), dict.fromkeys(KINDS, 0.0)
    errors: list[TensorError] = []
    checks: list[Check] = []
    merged = pair.merged_names()
    with Shards(pair.source_folder.root) as source, Shards(pair.folder.root) as output:
        # Outside of exact methods, what is merged as a whole is judged by its invariants afterwards.
        for tensor in pair.expected:
            if tensor.name not in comparable or tensor.name in merged:
                continue
            counts[tensor.kind] += 1
            if tensor.name in copied:
                continue
            begun = monotonic()
            if pair.expectation.promise == "drawn" and tensor.kind not in ("norms", "untouched"):
                fault = _not_drawn(tensor, pair, source, output)
                faults[tensor.kind] += [fault] if fault else []
            else:
                error = _deviation(tensor, pair, source, output)
                errors += [error] if tensor.kind != "untouched" else []
                if error.max_ulp:
                    faults[tensor.kind].append(_told(error) + _diagnosis(tensor, pair, source, output))
            advance(tensor.source.nbytes)
            seconds[tensor.kind] += monotonic() - begun
        if merged:
            from gqaconvert.validation.invariants import check_invariants

            checks += check_invariants(pair, comparable, source, output, advance)
    changed, comparing = scan.changed()
    faults["untouched"] += [changed[tensor.name] for tensor in pair.expected if tensor.name in changed]
    checks.insert(
        0,
        skipped("files.untouched", "all tensors were trained")
        if pair.record.trained == "all"
        else verdict(
            "files.untouched",
            faults["untouched"],
            f"{counts['untouched']} tensors are the source's, "
            + ("rounded once" if pair.record.dtype else "bit by bit"),
            f"{len(faults['untouched'])} tensors differ that no conversion touches",
            seconds=seconds["untouched"] + comparing,
        ),
    )
    for kind in KINDS[1:]:
        if counts[kind]:
            checks.append(_computed(kind, pair, faults[kind], counts[kind], errors, seconds[kind]))
        elif pair.record.trained is not None and kind == "weights":
            checks.append(skipped("files.pooled-weights", "trained since the conversion: no number can be recomputed"))
        elif not merged and kind == "weights":
            checks.append(skipped("files.pooled-weights", "no tensor of the right shape to compare"))
    return checks, errors


def _computed(kind: str, pair: Pair, faults: list[str], count: int, errors: list[TensorError], seconds: float) -> Check:
    of_kind = errors if kind == "weights" else []
    figures = {}
    if errors and pair.expectation.promise != "drawn":
        figures = {
            "max_abs": max((error.max_abs for error in of_kind), default=0.0),
            "max_ulp": max((error.max_ulp for error in of_kind), default=0),
            "relative_frobenius": max((error.frobenius for error in of_kind), default=0.0),
        }
    promise = {"mean": "the float64 mean of their group, rounded once", "first": "their group's first head"}.get(
        pair.expectation.promise, "freshly drawn"
    )
    if kind == "norms" and pair.expectation.promise in ("drawn", "spans"):
        promise = "the float64 mean of their group, rounded once"
    good, bad = f"{count} tensors: heads are {promise}", f"{len(faults)} of {count} tensors: heads are not {promise}"
    return verdict(f"files.pooled-{kind}", faults, good, bad, seconds=seconds, **figures)


def _told(error: TensorError) -> str:
    return (
        f"{error.name}: max abs {error.max_abs:.3g}, max {error.max_ulp:,} ulp, "
        f"relative Frobenius {error.frobenius:.3g}"
    )


Pooling = Callable[[list[Tensor]], Tensor]


def mean(heads: list[Tensor]) -> Tensor:
    """Sum in float64, one division."""
    total = heads[0].to(torch.float64)
    for head in heads[1:]:
        total = total + head
    return total / len(heads)


def first(heads: list[Tensor]) -> Tensor:
    """The first head."""
    return heads[0].to(torch.float64)


def recomputed(pair: Pair, tensor: ExpectedTensor) -> Pooling:
    """How a tensor's heads are made, for those whose numbers the method promises."""
    takes_first = pair.expectation.promise == "first" and tensor.kind != "untouched"
    return first if takes_first else mean


def _deviation(
    tensor: ExpectedTensor, pair: Pair, source: Shards, output: Shards, pooling: Pooling | None = None
) -> TensorError:
    pooling = pooling or recomputed(pair, tensor)
    # Nearly always every number is right, and that is seen at a third of the work.
    if all(
        torch.equal(stored, nearest(pooling(heads), stored.dtype))
        for heads, stored in _slices(tensor, pair, source, output)
    ):
        return TensorError(tensor.name, tensor.layer, 0.0, 0, 0.0)
    found = Deviation()
    for heads, stored in _slices(tensor, pair, source, output):
        largest = torch.stack([head.abs() for head in heads]).amax(dim=0)
        slack = largest.to(torch.float64) * len(heads) * 2.0**-52
        found.add(stored, pooling(heads), slack)
    frobenius = found.frobenius if found.finite else math.inf
    return TensorError(tensor.name, tensor.layer, found.max_abs, found.max_ulp, frobenius)


def _slices(
    tensor: ExpectedTensor, pair: Pair, source: Shards, output: Shards
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """The rows of a group's heads in the source, and what the output has of them, some at a time."""
    entry, row_size = pair.index.entries[tensor.name], _row_size(tensor)
    # New memory costs more than what is done with it here.
    buffers: list[Buffer] = []
    for segment in tensor.segments:
        for start, count in slices(segment.rows, row_size, len(segment.sources)):
            nbytes = count * row_size * 8
            if len(buffers) <= len(segment.sources) or len(buffers[0].view) < nbytes:
                buffers = [Buffer(nbytes) for _ in range(len(segment.sources) + 1)]
            heads = [
                source.rows(place, row + start, count, row_size, buffer)
                for (place, row), buffer in zip(segment.sources, buffers, strict=False)
            ]
            yield heads, output.rows(entry, segment.row + start, count, row_size, buffers[-1])


def _row_size(tensor: ExpectedTensor) -> int:
    return math.prod(tensor.shape) // max(1, sum(segment.rows for segment in tensor.segments))


def _not_drawn(tensor: ExpectedTensor, pair: Pair, source: Shards, output: Shards) -> str | None:
    """Fresh heads: finite, biases zero, weights of the initialiser's spread and none of the source's heads."""
    entry, row_size = pair.index.entries[tensor.name], _row_size(tensor)
    total = square = 0.0
    count = 0
    for segment in tensor.segments:
        stored = output.rows(entry, segment.row, segment.rows, row_size)
        heads = [source.rows(place, row, segment.rows, row_size).to(stored.dtype) for place, row in segment.sources]
        if len(heads) == 1:
            if not torch.equal(stored, heads[0]):
                return f"{tensor.name}: rows {segment.row:,} and on are not the source's"
            continue
        if not torch.isfinite(stored).all():
            return f"{tensor.name}: not finite"
        if tensor.kind == "biases":
            if stored.any():
                return f"{tensor.name}: fresh biases are zero, these are not"
            continue
        if any(torch.equal(stored, head) for head in heads):
            return f"{tensor.name}: rows {segment.row:,} and on are a head of the source, not a fresh one"
        exact = stored.to(torch.float64)
        total, square, count = total + float(exact.sum()), square + float(exact.square().sum()), count + exact.numel()
    if not count:
        return None
    wanted = pair.source.config.text.get("initializer_range", 0.02)
    spread = math.sqrt(square / count)
    # Six standard errors of a normal sample's spread and mean, and one per cent for rounding.
    if abs(spread / wanted - 1) > 6 / math.sqrt(2 * count) + 0.01 or abs(total / count) > 6 * wanted / math.sqrt(count):
        return f"{tensor.name}: spread {spread:.4g} about {total / count:.2g}, fresh weights have {wanted:g} about 0"
    return None


def _diagnosis(tensor: ExpectedTensor, pair: Pair, source: Shards, output: Shards) -> str:
    """Which known mistake explains a tensor, if one does."""

    def half(heads: list[Tensor]) -> Tensor:
        total = torch.zeros_like(heads[0])
        for head in heads:
            total += head
        return (total / len(heads)).to(torch.float64)

    guesses: list[tuple[str, ExpectedTensor, Pooling]] = [
        ("the sum of the heads, not their mean", tensor, lambda heads: mean(heads) * len(heads)),
        ("accumulated in the stored type", tensor, half),
        ("the group's first head alone", tensor, first),
    ]
    if pair.expectation.promise == "first":
        guesses.append(("the mean", tensor, mean))
    for label, segments in _regrouped(tensor):
        other = ExpectedTensor(
            tensor.name, tensor.dtype, tensor.shape, segments, tensor.source, tensor.layer, tensor.kind
        )
        guesses.append((label, other, recomputed(pair, tensor)))
    for label, other, pooling in guesses:
        if not _deviation(other, pair, source, output, pooling).max_ulp:
            return f": it is {label}"
    return ""


def _regrouped(tensor: ExpectedTensor) -> list[tuple[str, tuple[Segment, ...]]]:
    """The same heads in groups h % G instead of h // (H/G), and groups in reverse order; not for fused tensors."""
    size = len(tensor.segments[0].sources)
    if size < 2 or any(len(segment.sources) != size for segment in tensor.segments):
        return []
    places = [source for segment in tensor.segments for source in segment.sources]
    count = len(tensor.segments)
    tiled = tuple(Segment(s.row, s.rows, tuple(places[number::count])) for number, s in enumerate(tensor.segments))
    turned = tuple(
        Segment(s.row, s.rows, other.sources)
        for s, other in zip(tensor.segments, reversed(tensor.segments), strict=True)
    )
    return [
        ("pooled from tiled groups (h % G), not from consecutive heads", tiled),
        ("right but for the order of the heads, which is reversed", turned),
    ]
