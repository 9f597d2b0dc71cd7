"""Texts: the packaged samples, and the user's own in plain text or JSON lines."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gqaconvert.errors import InputError, MissingExtraError, SourceNotFoundError, StorageError

EXAMPLE = "example"
_SAMPLES = {"calibration": "calibration.txt", "heldout": "heldout.txt"}


def sample_path(kind: str) -> Path:
    """A packaged sample: ``calibration`` or ``heldout``, State of the Union speeches.

    Raises:
        SourceNotFoundError: the installation is damaged.
    """
    name = _SAMPLES[kind]
    package = Path(__file__).parent
    # In a wheel the samples lie in the package, in a checkout beside the example model.
    for path in (package / "data" / name, package.parent / "examples" / name):
        if path.is_file():
            return path
    raise SourceNotFoundError(f"the packaged text {name} is missing", hint="install gqaconvert again")


def text_path(name: str) -> Path:
    """The file behind what the user gave: a path, or ``example`` for the packaged calibration text.

    Raises:
        SourceNotFoundError: no such file.
    """
    path = sample_path("calibration") if name == EXAMPLE else Path(name).expanduser()
    if not path.is_file():
        raise SourceNotFoundError(f"no such text file: {name}")
    return path


def sha256_of(name: str) -> str:
    """Digest of a text file.

    Raises:
        SourceNotFoundError: no such file.
    """
    with text_path(name).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_documents(name: str, *, field: str = "text") -> Iterator[str]:
    """The documents of a text file: one of plain text, or a field of .jsonl lines.

    Raises:
        SourceNotFoundError: no such file.
        InputError: not UTF-8, or a line that has no text.
        StorageError: it cannot be read.
    """
    path = text_path(name)
    try:
        with path.open(encoding="utf-8") as file:
            if path.suffix.lower() not in (".jsonl", ".json"):
                yield file.read()
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text_of(line, path, number, field)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error


def _text_of(line: str, path: Path, number: int, field: str) -> str:
    try:
        text = json.loads(line)[field]
    except (ValueError, TypeError, KeyError):
        text = None
    if not isinstance(text, str):
        raise InputError(f'{path}, line {number}: no JSON object with a "{field}"')
    return text


def load_tokenizer(folder: Path) -> Any:  # noqa: ANN401
    """The tokenizer of a model's folder; its classes are not typed.

    Raises:
        MissingExtraError: transformers is not installed.
        InputError: there is none, or it cannot be loaded.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtraError("transformers", "transformers") from None
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{folder}: its tokenizer cannot be loaded: {reason}") from error
