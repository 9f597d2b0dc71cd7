"""Where training text comes from: files, folders, globs and Hub data sets, read as pieces of documents.

A source, as the user writes it, is one of

    notes.txt, speeches/, 'shards/*.jsonl'    plain text (one document a file), JSON lines, parquet; by the suffix
    hub:NAME[:CONFIG[:SPLIT]]                 a Hub data set, or a folder that the ``datasets`` library can load
    tokens.npy, tokens.bin[:DTYPE]            token ids, already made: a 1-D array, or bare little-endian integers
"""

import glob
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gqaconvert.checkpoint.writer import hash_file
from gqaconvert.errors import HubError, InputError, MissingExtraError, SourceNotFoundError, StorageError
from gqaconvert.texts import read_documents, text_path

HUB = "hub:"
TOKEN_TYPES = ("uint16", "uint32", "int32", "int64")
_KINDS = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".npy": "tokens", ".bin": "tokens"}
_TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
_PIECE = 2**20
"""Characters after which a plain text is cut, at the next line's end, so that a file of any size can be tokenised."""


@dataclass(frozen=True)
class Source:
    """One place that data comes from.

    Attributes:
        kind: "text", "jsonl", "parquet", "hub" or "tokens".
        name: file, or name of the Hub data set.
        config: configuration of a Hub data set.
        split: split of a Hub data set.
        dtype: type of the integers of a .bin file, None to take what the vocabulary needs.
    """

    kind: str
    name: str
    config: str | None = None
    split: str = "train"
    dtype: str | None = None

    @property
    def path(self) -> Path:
        """The file."""
        return text_path(self.name) if self.kind in ("text", "jsonl") else Path(self.name).expanduser()


class Piece(NamedTuple):
    """A document, or a part of a long one."""

    text: str
    begins: bool
    ends: bool


def parse_sources(names: tuple[str, ...]) -> tuple[Source, ...]:
    """What the user gave, as single sources; folders and globs become their files in the order of the names.

    Raises:
        SourceNotFoundError: no such file, or a folder or glob without data files.
        InputError: nothing given, or a type of integers that is none.
    """
    sources = tuple(source for name in names for source in _parse(name))
    if not sources:
        raise InputError("no data", hint="--data FILE, a folder, or hub:NAME")
    return sources


def _parse(name: str) -> Iterator[Source]:
    if name.startswith(HUB):
        parts = name[len(HUB) :].split(":", 2)  # a split may have colons of its own: train[:1%]
        if not parts[0]:
            raise InputError(f"{name!r} names no data set", hint="for example hub:allenai/c4:en:train")
        parts += [""] * (3 - len(parts))
        yield Source("hub", parts[0], parts[1] or None, parts[2] or "train")
        return
    path, dtype = Path(name).expanduser(), None
    if not path.exists() and ".bin:" in name:
        name, _, dtype = name.rpartition(":")
        path = Path(name).expanduser()
        if dtype not in TOKEN_TYPES:
            raise InputError(f"{name}: {dtype!r} is no type of token ids", hint=f"known: {', '.join(TOKEN_TYPES)}")
    if path.is_dir():
        found = [file for file in sorted(path.rglob("*")) if file.is_file() and _is_data(file)]
        if not found:
            raise SourceNotFoundError(
                f"{name} holds no data files", hint=f"known: {', '.join((*_TEXT_SUFFIXES, *_KINDS))}"
            )
    elif not path.is_file() and any(character in name for character in "*?["):
        found = [Path(match) for match in sorted(glob.glob(str(path), recursive=True)) if Path(match).is_file()]  # noqa: PTH207  (absolute patterns)
        if not found:
            raise SourceNotFoundError(f"no file matches {name}")
    else:
        text_path(name)  # also knows "example"
        found = [Path(name)]
    for file in found:
        yield Source(_KINDS.get(file.suffix.lower(), "text"), str(file), dtype=dtype)


def _is_data(file: Path) -> bool:
    return file.suffix.lower() in (*_TEXT_SUFFIXES, *_KINDS) and not file.name.startswith(".")


def identity(source: Source) -> dict[str, Any]:
    """What tells this source's content from any other: size and sha256 of a file, commit of a Hub data set.

    Raises:
        StorageError: it cannot be read.
        SourceNotFoundError: no such data set.
        HubError: the Hub cannot be reached.
    """
    if source.kind == "hub":
        place = {"kind": source.kind, "name": source.name, "config": source.config, "split": source.split}
        folder = Path(source.name).expanduser()
        return place | ({"sha256": _hash_folder(folder)} if folder.is_dir() else {"revision": _revision(source.name)})
    try:
        found = {"kind": source.kind, "name": source.path.name, "nbytes": source.path.stat().st_size}
        return found | {"sha256": hash_file(source.path)} | ({"dtype": source.dtype} if source.dtype else {})
    except OSError as error:
        raise StorageError(f"cannot read {source.name}: {error.strerror}") from error


def _hash_folder(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{file.relative_to(folder).as_posix()}\0{hash_file(file)}\n".encode())
    return digest.hexdigest()


def _revision(name: str) -> str | None:
    """The data set's present commit; None where only the local cache can be asked."""
    from huggingface_hub import HfApi, constants, errors

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        return HfApi().dataset_info(name).sha
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise SourceNotFoundError(
            f"{HUB}{name} is neither a folder nor a data set that you can see",
            hint="check the spelling; for a private one run 'hf auth login' first",
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise HubError(
            f"the Hub fails for the data set {name}: {_first_line(error)}", hint="try again later"
        ) from error


def read_pieces(source: Source, *, field: str, revision: str | None, streaming: bool) -> Iterator[Piece]:
    """The documents of a source, in order.

    Args:
        source: where from; not "tokens".
        field: name of the field or column that holds the text.
        revision: commit of a Hub data set.
        streaming: read a Hub data set as it travels instead of fetching all of it first.

    Raises:
        InputError: no such field, or no text in it.
        MissingExtraError: ``datasets`` or ``pyarrow`` is not installed.
        SourceNotFoundError, HubError, StorageError: it cannot be read.
    """
    if source.kind == "text":
        yield from _text_pieces(source.path)
        return
    documents = {
        "jsonl": lambda: read_documents(source.name, field=field),
        "parquet": lambda: _parquet_documents(source.path, field),
        "hub": lambda: _hub_documents(source, field, revision, streaming=streaming),
    }[source.kind]()
    for document in documents:
        yield Piece(document, begins=True, ends=True)


def _text_pieces(path: Path) -> Iterator[Piece]:
    begins, lines, size = True, [], 0
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                lines.append(line)
                size += len(line)
                if size >= _PIECE:
                    yield Piece("".join(lines), begins, ends=False)
                    begins, lines, size = False, [], 0
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    yield Piece("".join(lines), begins, ends=True)


def _parquet_documents(path: Path, field: str) -> Iterator[str]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise MissingExtraError("pyarrow", "data") from None
    try:
        with pq.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise _no_field(str(path), field, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=1024, columns=[field]):
                yield from _texts(str(path), field, batch.column(0).to_pylist())
    except (pa.ArrowInvalid, pa.ArrowIOError) as error:
        raise InputError(f"{path} is not a readable parquet file: {_first_line(error)}") from error


def _hub_documents(source: Source, field: str, revision: str | None, *, streaming: bool) -> Iterator[str]:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "data") from None
    label = f"{HUB}{source.name}"
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        data = datasets.load_dataset(
            source.name, source.config, split=source.split, revision=revision, streaming=streaming
        )
        columns = data.column_names  # a stream may not know them
        if columns is not None and field not in columns:
            raise _no_field(label, field, columns)
        for rows in data.select_columns([field]).iter(batch_size=1024):
            yield from _texts(label, field, rows[field])
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError) as error:
        raise SourceNotFoundError(f"{label}: {_first_line(error)}") from error
    except (datasets.exceptions.DatasetsError, ValueError, KeyError) as error:
        # An unknown configuration or split, a script that would have to be run, a broken file.
        raise InputError(f"{label} cannot be loaded: {_first_line(error)}") from error
    except (ConnectionError, TimeoutError) as error:
        raise HubError(f"the Hub cannot be reached for {label}: {_first_line(error)}") from error
    finally:
        if shown:
            datasets.enable_progress_bars()


def _texts(label: str, field: str, values: list[Any]) -> Iterator[str]:
    for value in values:
        if not isinstance(value, str):
            raise InputError(f"{label}: a {field!r} is no text but {type(value).__name__}")
        yield value


def _no_field(label: str, field: str, names: list[str]) -> InputError:
    return InputError(f"{label} has no column {field!r}", hint=f"its columns: {', '.join(names)}")


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]


def tokenizer_digest(folder: Path) -> str:
    """sha256 of the files that make a tokenizer what it is."""
    names = (
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
        "spiece.model", "vocab.json", "merges.txt",
    )  # fmt: skip
    found = {name: hash_file(folder / name) for name in names if (folder / name).is_file()}
    return digest_of(found)


def digest_of(document: Mapping[str, Any]) -> str:
    """sha256 of a JSON document's canonical form."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
