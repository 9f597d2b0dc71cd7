"""Training data: tokenised once into a folder with a manifest, then a pure function of (seed, step).

    CACHE/FINGERPRINT/            one folder for each set of sources, tokenizer and settings; appears by one rename
        manifest.json             what it was made from, by hashes
        tokens.bin                little-endian uint16 or uint32; absent where the user's own token files are used

The stream of tokens is cut into windows of T tokens; every epoch visits all windows once, in an order of its own. No
state is kept while training: the step says which rows come next, on any number of processes.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.index import read_json
from gqaconvert.checkpoint.staging import Staging
from gqaconvert.checkpoint.writer import write_file
from gqaconvert.errors import CheckpointError, GqaConvertError, InputError, StorageError
from gqaconvert.families.config import LARGEST_SIZE, VOCABULARY, ModelConfig
from gqaconvert.texts import load_tokenizer
from gqaconvert.uptrain.packing import PACKINGS, Batch, make_batch
from gqaconvert.uptrain.sources import Piece, Source, digest_of, identity, parse_sources, read_pieces, tokenizer_digest

SCHEMA = "gqaconvert.tokens/1"
MANIFEST, TOKENS = "manifest.json", "tokens.bin"
_BATCH = 2**18
"""Characters that go to the tokenizer at once."""
_CHECKED = 2**24
"""Token ids of the user's own files that are checked at once."""

Array = NDArray[Any]


@dataclass(frozen=True)
class Shard:
    """A run of token ids in one file.

    Attributes:
        path: name within the folder, or an absolute path to a file of the user.
        dtype: numpy's name of the little-endian integers.
        offset: bytes before the first.
        tokens: how many.
    """

    path: str
    dtype: str
    offset: int
    tokens: int


@dataclass(frozen=True)
class Manifest:
    """What a folder of tokens holds and where it comes from.

    Attributes:
        fingerprint: digest of everything that decides what the tokens are.
        sources: identities of the sources, with hashes.
        tokenizer: digest of the tokenizer's files, None where all sources were tokenised before.
        vocabulary: of the model.
        end: id of the token that ends a document, None if there is none.
        field: name of the text field.
        max_tokens: at which the tokenising stopped, None for all.
        documents: how many were tokenised, None where they came as tokens.
        largest_id: of all tokens.
        shards: where the tokens are.
    """

    fingerprint: str
    sources: tuple[dict[str, Any], ...]
    tokenizer: str | None
    vocabulary: int
    end: int | None
    field: str
    max_tokens: int | None
    documents: int | None
    largest_id: int
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        """All of them."""
        return sum(shard.tokens for shard in self.shards)

    def to_json(self) -> dict[str, Any]:
        """The form on disk."""
        fields = {name: value for name, value in vars(self).items() if name != "shards"}
        return {"schema": SCHEMA, **fields, "tokens": self.tokens, "shards": [vars(shard) for shard in self.shards]}

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """The manifest of a folder.

        Raises:
            InputError: it is none of ours, or another version's.
        """
        try:
            document = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            if document.pop("schema") != SCHEMA:
                raise ValueError
            del document["tokens"]
            shards = tuple(Shard(**shard) for shard in document.pop("shards"))
            return cls(**document | {"sources": tuple(document["sources"])}, shards=shards)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise InputError(
                f"{folder} is no folder of tokens made by this version", hint="delete it; it is made again"
            ) from None


@dataclass(frozen=True)
class TokenData:
    """Windows of tokens, and the order in which they are seen.

    Attributes:
        folder: with the manifest.
        manifest: read from it.
        seq_len: T, tokens a window.
        packing: "concat" or "document".
        first: number of the first window that belongs to this part.
        count: number of windows.
    """

    folder: Path
    manifest: Manifest
    seq_len: int
    packing: str
    first: int
    count: int

    @property
    def fingerprint(self) -> str:
        """Digest of everything that decides what `batch` returns, but for seed and step."""
        return digest_of({
            "tokens": self.manifest.fingerprint, "seq_len": self.seq_len, "packing": self.packing,
            "first": self.first, "count": self.count,
        })  # fmt: skip

    @property
    def tokens(self) -> int:
        """Tokens of one epoch."""
        return self.count * self.seq_len

    def batch(self, seed: int, step: int, batch_size: int, *, rank: int = 0, world: int = 1) -> Batch:
        """The rows of a step, counted from 0; of ``world`` processes, ``rank`` gets every world-th row.

        The global batch is the same for any number of processes. No window is seen twice within an epoch.
        """
        first = step * batch_size
        return self.samples(seed, [first + row for row in range(rank, batch_size, world)])

    def ordered(self, batch_size: int) -> Iterator[Batch]:
        """All windows in the order of the text, for evaluation; the last batch may be smaller."""
        for start in range(0, self.count, batch_size):
            yield self.windows(list(range(start, min(start + batch_size, self.count))))

    def windows(self, numbers: list[int]) -> Batch:
        """Chosen windows, numbered within this part."""
        rows = np.empty((len(numbers), self.seq_len), np.int64)
        shards = _open_shards(self.folder, self.manifest.shards)
        for row, number in zip(rows, numbers, strict=True):
            _read(shards, (self.first + number) * self.seq_len, row)
        return make_batch(rows, packing=self.packing, end=self.manifest.end)

    def split(self, held_out: int) -> tuple["TokenData", "TokenData"]:
        """(for training, held out): the last windows of the stream are kept from training.

        Raises:
            InputError: nothing would be left.
        """
        if not 0 <= held_out < self.count:
            raise InputError(
                f"{held_out} held-out windows of {self.seq_len} tokens leave nothing of {self.count} to train on",
                hint="more data, or evaluation data of its own",
            )
        rest = self.count - held_out
        return replace(self, count=rest), replace(self, first=self.first + rest, count=held_out)

    def samples(self, seed: int, numbers: list[int]) -> Batch:
        """Chosen samples of the whole run, counted over all steps: sample ``step * batch_size + row`` is that row."""
        return self.windows([self._place(seed, number) for number in numbers])

    def _place(self, seed: int, sample: int) -> int:
        epoch, place = divmod(sample, self.count)
        return int(_order(self.count, seed, epoch)[place])


@lru_cache(maxsize=4)
def _order(count: int, seed: int, epoch: int) -> Array:
    # RandomState, as numpy has frozen its stream: the same order with every version, so that any run can be resumed.
    return np.random.RandomState([seed % 2**32, epoch]).permutation(count)


@lru_cache(maxsize=8)
def _open_shards(folder: Path, shards: tuple[Shard, ...]) -> tuple[Array, ...]:
    return tuple(_map(folder / shard.path, shard) for shard in shards)


def _map(path: Path, shard: Shard) -> Array:
    dtype = np.dtype(shard.dtype).newbyteorder("<")
    try:
        size = path.stat().st_size
        if size < shard.offset + shard.tokens * dtype.itemsize:
            raise InputError(f"{path} has become shorter since its tokens were counted", hint="prepare the data again")
        return np.memmap(path, dtype, "r", shard.offset, (shard.tokens,))
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def _read(shards: tuple[Array, ...], start: int, row: NDArray[np.int64]) -> None:
    """Fill ``row`` with the tokens from ``start`` on, across shards."""
    filled = 0
    for shard in shards:
        if start < len(shard) and filled < len(row):
            part = shard[start : start + len(row) - filled]
            row[filled : filled + len(part)] = part
            filled += len(part)
        start = max(0, start - len(shard))
    assert filled == len(row), "a window lies within the stream"


def open_tokens(folder: Path, *, seq_len: int, packing: str = "concat") -> TokenData:
    """Open a folder that `prepare` made.

    Raises:
        InputError: no such folder, or less than one window of tokens, or no token that ends documents.
        StorageError: a file of tokens cannot be read.
    """
    if packing not in PACKINGS:
        raise InputError(f"no packing {packing!r}", hint=f"known: {', '.join(PACKINGS)}")
    manifest = Manifest.read(folder)
    if manifest.tokens < seq_len:
        raise InputError(
            f"the data has {manifest.tokens:,} tokens, less than one sequence of {seq_len:,}",
            hint="more text, or a smaller --seq-len",
        )
    if packing == "document" and manifest.end is None:
        raise InputError(
            "the model has no end-of-text token, so documents cannot be told apart", hint="--packing concat"
        )
    _open_shards(folder, manifest.shards)
    return TokenData(folder, manifest, seq_len, packing, 0, manifest.tokens // seq_len)


def prepare(
    sources: tuple[str, ...],
    model: Path,
    cache: Path,
    *,
    seq_len: int,
    packing: str = "concat",
    field: str = "text",
    max_tokens: int | None = None,
    advance: Callable[[int], None] = lambda tokens: None,
) -> TokenData:
    """Tokenise the sources, or find that this was done before.

    Args:
        sources: as in `gqaconvert.uptrain.sources`.
        model: folder of the model: its tokenizer, its vocabulary.
        cache: where the folder of tokens goes.
        seq_len: T, tokens a window.
        packing: "concat": windows are cut from the joined documents, each ended by the end-of-text token, and attention
            goes across, as is usual in pre-training. "document": the same windows, but attention and positions stop at
            a document's end.
        field: of JSON lines, parquet files and Hub data sets.
        max_tokens: stop after so many; of a Hub data set no more is fetched than needed.
        advance: called with the number of new tokens.

    Raises:
        InputError: no data, too little data, or token ids beyond the vocabulary.
        MissingExtraError: a package of the extra ``data`` or ``transformers`` is not installed.
        SourceNotFoundError, HubError: a source cannot be found or reached.
        StorageError: reading or writing fails.
    """
    parsed = parse_sources(sources)
    vocabulary, config_end = _model_facts(model)
    recipe: dict[str, Any] = {
        "schema": SCHEMA,
        "sources": [identity(source) for source in parsed],
        "tokenizer": tokenizer_digest(model) if any(source.kind != "tokens" for source in parsed) else None,
        "vocabulary": vocabulary,
        "config_end": config_end,
        "field": field,
        "max_tokens": max_tokens,
    }
    # Token files are used where they are, so a copy of them elsewhere is another folder.
    places = [str(source.path.resolve()) for source in parsed if source.kind == "tokens"]
    fingerprint = digest_of(recipe | {"places": places})
    folder = cache / fingerprint[:16]
    if not (folder / MANIFEST).is_file():
        maker = _Maker(model, vocabulary, config_end, field, max_tokens, advance)
        try:
            with Staging(folder) as staging:
                staging.begin(fingerprint, resume=False)
                try:
                    manifest = maker.make(staging.model, parsed, recipe, fingerprint)
                    write_file(staging.model / MANIFEST, json.dumps(manifest.to_json(), indent=2).encode())
                    staging.commit()
                except (GqaConvertError, OSError):
                    staging.discard()
                    raise
        except OSError as error:
            raise StorageError(f"cannot write the tokens to {cache}: {error.strerror}") from error
    return open_tokens(folder, seq_len=seq_len, packing=packing)


def _model_facts(model: Path) -> tuple[int, int | None]:
    """(vocabulary, end-of-text token) by config.json."""
    config = ModelConfig.of(read_json(LocalFolder.open(model), "config.json"))
    vocabulary = config.count(VOCABULARY, LARGEST_SIZE)
    if vocabulary is None:
        raise CheckpointError(f"{model}/config.json does not say the size of the vocabulary")
    end = config.text.get("eos_token_id", config.raw.get("eos_token_id"))
    end = end[0] if isinstance(end, list) and end else end
    return vocabulary, end if isinstance(end, int) and 0 <= end < vocabulary else None


@dataclass
class _Maker:
    """Makes one folder of tokens."""

    model: Path
    vocabulary: int
    config_end: int | None
    field: str
    max_tokens: int | None
    advance: Callable[[int], None]

    def make(self, folder: Path, sources: tuple[Source, ...], recipe: dict[str, Any], fingerprint: str) -> Manifest:
        """Write the tokens to ``folder``; returns what goes to its manifest."""
        shards: list[Shard] = []
        end, documents, largest = self.config_end, 0, -1
        text = [source for source in sources if source.kind != "tokens"]
        if text:
            tokenizer = load_tokenizer(self.model)
            end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else end
            encoder = _Encoder(tokenizer, end, self.vocabulary)
            with (folder / TOKENS).open("wb") as file:
                written, documents, largest = self._tokenise(sources, recipe, encoder, file)
            if written:
                shards.append(Shard(TOKENS, self.dtype, 0, written))
        for source in sources:
            if source.kind == "tokens":
                shard, found = self._adopt(source, sum(shard.tokens for shard in shards))
                shards.append(shard)
                largest = max(largest, found)
        if not sum(shard.tokens for shard in shards):
            names = ", ".join(source.name for source in sources[:3])
            raise InputError(f"the data is empty: no text in {names}")
        return Manifest(
            fingerprint, tuple(recipe["sources"]), recipe["tokenizer"], self.vocabulary, end, self.field,
            self.max_tokens, documents if text else None, largest, tuple(shards),
        )  # fmt: skip

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocabulary <= 2**16 else "uint32"

    def _tokenise(
        self, sources: tuple[Source, ...], recipe: dict[str, Any], encoder: "_Encoder", file: BinaryIO
    ) -> tuple[int, int, int]:
        """(tokens, documents, largest id) of all sources that are text."""
        written = documents = 0
        largest = -1
        for source, known in zip(sources, recipe["sources"], strict=True):
            if source.kind == "tokens":
                continue
            pieces = read_pieces(
                source, field=self.field, revision=known.get("revision"), streaming=self.max_tokens is not None
            )
            for group in _grouped(pieces):
                ids = encoder.encode(group, source.name)
                if self.max_tokens is not None:
                    ids = ids[: self.max_tokens - written]
                file.write(ids.astype(np.dtype(self.dtype).newbyteorder("<")).tobytes())
                written += len(ids)
                documents += sum(piece.ends for piece in group)
                largest = max(largest, int(ids.max(initial=-1)))
                self.advance(len(ids))
                if written == self.max_tokens:
                    return written, documents, largest
        return written, documents, largest

    def _adopt(self, source: Source, before: int) -> tuple[Shard, int]:
        """A file of token ids as a shard, and its largest id, all of them checked; ``before`` tokens are there."""
        path = source.path.resolve()
        dtype, offset, count = _npy_layout(path) if path.suffix.lower() == ".npy" else self._bin_layout(path, source)
        if self.max_tokens is not None:
            count = min(count, self.max_tokens - before)
        shard = Shard(str(path), dtype, offset, count)
        tokens = _map(path, shard) if count else np.empty(0, dtype)
        smallest = largest = 0
        for start in range(0, count, _CHECKED):
            part = tokens[start : start + _CHECKED]
            smallest, largest = min(smallest, int(part.min())), max(largest, int(part.max()))
            self.advance(len(part))
        if smallest < 0 or largest >= self.vocabulary:
            wrong = smallest if smallest < 0 else largest
            raise InputError(
                f"{path} has the token id {wrong}, the model's vocabulary has {self.vocabulary}",
                hint=f"another tokenizer made it, or it is not {dtype} (a .bin file: --data {source.name}:uint32)",
            )
        return shard, largest

    def _bin_layout(self, path: Path, source: Source) -> tuple[str, int, int]:
        dtype = source.dtype or self.dtype
        size, width = path.stat().st_size, np.dtype(dtype).itemsize
        if size % width:
            raise InputError(f"{path} has {size} bytes, no whole number of {dtype}")
        return dtype, 0, size // width


def _npy_layout(path: Path) -> tuple[str, int, int]:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise InputError(f"{path} is no .npy file of numbers: {error}") from error
    kind = array.dtype
    if not isinstance(array, np.memmap) or kind.kind not in "iu" or kind.newbyteorder("<") != kind or array.ndim != 1:
        raise InputError(f"{path} is not one row of little-endian integers, but {array.ndim}-D of {kind}")
    return kind.name, array.offset, len(array)


def _grouped(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.text)
        if size >= _BATCH:
            yield group
            group, size = [], 0
    if group:
        yield group


class _Encoder:
    """Text to token ids: each document as the tokenizer begins it, and ended once."""

    def __init__(self, tokenizer: Any, end: int | None, vocabulary: int) -> None:  # noqa: ANN401
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._suffix = [] if end is None else [end]
        # Where the same token begins and ends documents, one between two of them is enough.
        self._prefix = [token for token in tokenizer("")["input_ids"] if token != end]

    def encode(self, pieces: list[Piece], name: str) -> NDArray[np.int64]:
        """The ids of a group of pieces, int64; a document of blanks only gives none."""
        encoded = self._tokenizer(
            [piece.text for piece in pieces], add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        tokens: list[int] = []
        for piece, ids in zip(pieces, encoded, strict=True):
            if piece.begins and piece.ends and not piece.text.strip():
                continue
            tokens += (self._prefix if piece.begins else []) + ids + (self._suffix if piece.ends else [])
        found = np.asarray(tokens, np.int64)
        if found.max(initial=-1) >= self._vocabulary:
            raise InputError(
                f"{name}: the tokenizer gives ids up to {found.max()}, the model's vocabulary has {self._vocabulary}",
                hint="the tokenizer in the model's folder is not the model's",
            )
        return found


def open_parts(
    tokens: Path, eval_tokens: Path | None, eval_windows: int, *, seq_len: int, packing: str
) -> tuple[TokenData, TokenData | None]:
    """(what is trained on, what is evaluated on): other text, or the last windows of the same; None for no evaluation.

    Raises:
        InputError: a folder does not hold what was asked for.
    """
    data = open_tokens(tokens, seq_len=seq_len, packing=packing)
    if not eval_windows:
        return data, None
    if eval_tokens is None:
        return data.split(eval_windows)
    held_out = open_tokens(eval_tokens, seq_len=seq_len, packing=packing)
    return data, replace(held_out, count=min(held_out.count, eval_windows))


def usable(data: TokenData, needed: int) -> str | None:
    """A word on data that a budget repeats: how often each token is seen, where that is more than 4 times.

    Muennighoff et al. 2023 (Scaling Data-Constrained Language Models, section 1): up to 4 epochs are nearly as good as
    new data.
    """
    epochs = needed / data.tokens
    return f"every token is seen {epochs:.1f} times; up to 4 is nearly as good as new text" if epochs > 4 else None
