"""The header of a safetensors file: parsed, distrusted, written. JSON only, no tensor data is touched.

Format (github.com/huggingface/safetensors, README "Format"): 8 bytes little-endian header length N, N bytes of JSON
``{"name": {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {str: str}}``, then the data, without
holes or overlaps, offsets counted from the end of the header.
"""

import json
import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gqaconvert.checkpoint import dtypes
from gqaconvert.errors import CheckpointError, UnsupportedFormatError

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself: no loader would read more."""
_MAX_RANK = 64  # of torch and numpy; keeps products of hostile shapes cheap
_MAX_NUMBER = 2**63
_ONLY_INT = {int}  # bool is another type, and no number of a header


class TensorEntry(NamedTuple):
    """One tensor as the header of its shard describes it. ``start`` counts from the beginning of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardHeader:
    """What one shard's header says. ``data_start`` and ``data_bytes`` in bytes."""

    shard: str
    entries: tuple[TensorEntry, ...]
    metadata: Mapping[str, str]
    data_start: int
    data_bytes: int


def header_length(prefix: bytes, *, shard: str) -> int:
    """Length of the JSON that follows the first 8 bytes.

    Raises:
        CheckpointError: not a safetensors file, or a header that no loader would accept.
        UnsupportedFormatError: the file is a Git LFS pointer, GGUF or pickle under a safetensors name.
    """
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if len(prefix) >= LENGTH_BYTES and 2 <= length <= MAX_HEADER_BYTES:
        return length
    # Only a length that no safetensors file has can be another format's first bytes.
    refuse_other_magic(prefix, name=shard)
    if len(prefix) < LENGTH_BYTES:
        raise CheckpointError(f"{shard} is cut off: {len(prefix)} bytes are no safetensors file", hint=FETCH_HINT)
    raise CheckpointError(
        f"{shard} is not a safetensors file: its header would be {length:,} bytes long", hint=FETCH_HINT
    )


def refuse_other_magic(prefix: bytes, *, name: str) -> None:
    """Name the format that a file's first bytes belong to.

    Raises:
        UnsupportedFormatError: they are those of a Git LFS pointer, GGUF or pickle.
    """
    for magic, what, hint in _OTHER_MAGIC:
        if prefix.startswith(magic):
            raise UnsupportedFormatError(f"{name} is {what}", hint=hint)


GGUF_HINT = "gqaconvert reads the original Hugging Face checkpoint; convert that one, then make the GGUF from it"
PICKLE_HINT = (
    "pickles can run code and are never loaded; use the repository's safetensors revision, or re-save it: "
    "transformers' from_pretrained(...).save_pretrained(DIR)"
)
FETCH_HINT = "fetch the file again"
_OTHER_MAGIC = (
    (b"version ", "a Git LFS pointer, not the file itself", "run 'git lfs pull' in the repository"),
    (b"GGUF", "a GGUF file", GGUF_HINT),
    (b"PK\x03\x04", "a PyTorch pickle under another name", PICKLE_HINT),
    (b"\x80", "a pickle under another name", PICKLE_HINT),
)


def parse_header(raw: bytes, *, shard: str, file_size: int | None) -> ShardHeader:
    """Parse and check one header.

    Args:
        raw: the JSON bytes, without the length.
        shard: file name, for entries and messages.
        file_size: bytes of the whole file, None if unknown.

    Raises:
        CheckpointError: anything that contradicts the format or the file's size.
    """
    try:
        text = raw.decode()
        # A loader's JSON parser refuses halves of surrogate pairs; only escapes can bring them in.
        if "\\ud" in text or "\\uD" in text:
            json.dumps(json.loads(text), ensure_ascii=False).encode()
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{shard}: the safetensors header is not JSON ({error})", hint=FETCH_HINT) from None
    if not isinstance(table, dict):
        raise CheckpointError(f"{shard}: the safetensors header is not a JSON object", hint=FETCH_HINT)
    metadata = table.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{shard}: __metadata__ of the safetensors header must map strings to strings")
    data_start = LENGTH_BYTES + len(raw)
    entries = [_entry(name, fields, shard=shard, data_start=data_start) for name, fields in table.items()]
    entries.sort(key=lambda entry: (entry.start, entry.nbytes))
    end = data_start
    for entry in entries:
        if entry.start != end:
            fault = "overlaps the tensor before it" if entry.start < end else "leaves a gap before it"
            raise CheckpointError(f"{shard}: tensor {entry.name!r} {fault}; the header is damaged or hostile")
        end += entry.nbytes
    if file_size is not None and file_size != end:
        fault = "is cut off" if file_size < end else "has bytes that no tensor owns"
        raise CheckpointError(f"{shard} {fault}: {file_size:,} bytes, its header says {end:,}", hint=FETCH_HINT)
    return ShardHeader(shard, tuple(entries), metadata, data_start, end - data_start)


def _entry(name: str, fields: Any, *, shard: str, data_start: int) -> TensorEntry:  # noqa: ANN401
    try:
        dtype, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        numbers = (begin, end, *shape)
        whole = set(map(type, numbers)) == _ONLY_INT and min(numbers) >= 0 and max(numbers) < _MAX_NUMBER
        if whole and len(shape) <= _MAX_RANK and end - begin == dtypes.nbytes(dtype, math.prod(shape)):
            return TensorEntry(name, dtype, tuple(shape), shard, data_start + begin, end - begin)
    except (KeyError, TypeError, ValueError):
        pass
    raise CheckpointError(f"{shard}: the header's entry for tensor {name!r} makes no sense: {reprlib.repr(fields)}")


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file (length and JSON) that holds ``(name, dtype, shape)`` in this order, without gaps."""
    table: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + dtypes.nbytes(dtype, math.prod(shape))
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    # Spaces up to a multiple of 8, as the library does: the data starts aligned.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
