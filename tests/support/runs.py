"""Running the command line, and reading what it wrote without the package under test."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner, Result

from gqaconvert.cli.app import app

COMMAND = (sys.executable, "-m", "gqaconvert")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def invoke(*arguments: object) -> Result:
    """Run a command in this process; an exception that is no exit is raised."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def convert(source: Path, target: Path, *options: object) -> Path:
    """Run a conversion that must succeed and return its output folder."""
    result = invoke("convert", source, target, *options)
    assert result.exit_code == 0, result.stderr
    return target


def fails(exit_code: int, *arguments: object) -> str:
    """Run a command that must fail with this exit code, with an error line; return its stderr."""
    result = invoke(*arguments)
    assert result.exit_code == exit_code, result.output
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    return result.stderr


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:  # noqa: ANN401
    """Run a command in a process of its own."""
    command = [*COMMAND, *(str(argument) for argument in arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, **options)


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start a command in a process of its own."""
    command = [*COMMAND, *(str(argument) for argument in arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(condition: Callable[[], bool], running: "subprocess.Popen[str]") -> None:
    """Wait for something that a running process does; fail if it ends before."""
    while not condition():
        assert running.poll() is None, f"ended too early: {running.communicate()}"
        time.sleep(0.002)


@contextmanager
def half_done(source: Path, target: Path, *options: object) -> Iterator["subprocess.Popen[str]"]:
    """A conversion in a process of its own that has begun to write weights, and is paused in it."""
    running = start("convert", source, target, *options)
    try:
        wait_until(lambda: any(target.parent.glob(".*/model/*.safetensors")), running)
        running.send_signal(signal.SIGSTOP)
        assert running.poll() is None
        yield running
    finally:
        if running.poll() is None:
            running.kill()
        running.communicate()


def tree(folder: Path) -> dict[str, bytes]:
    """Contents of all files below a folder, hidden ones too, by relative name."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of the last change of everything below a folder."""
    return {
        path.relative_to(folder).as_posix(): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def read_json(path: Path) -> Any:  # noqa: ANN401
    """A JSON document."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_json(path: Path, document: object) -> None:
    """Write a JSON document."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False), encoding="utf-8")


def edit_config(folder: Path, *removed: str, **changes: object) -> dict[str, Any]:
    """Remove and set keys of config.json; returns the new document."""
    config = {key: value for key, value in read_json(folder / "config.json").items() if key not in removed} | changes
    write_json(folder / "config.json", config)
    return config


def edit_tensors(folder: Path, changes: Mapping[str, Tensor]) -> None:
    """Set tensors of a checkpoint in one file."""
    tensors = load_file(folder / SINGLE) | {name: tensor.contiguous() for name, tensor in changes.items()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, as the safetensors library reads them."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


class RawTensor(NamedTuple):
    """A tensor as its file stores it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def read_raw(path: Path) -> tuple[dict[str, RawTensor], dict[str, str] | None]:
    """The tensors of one file by name and its metadata, of any type, whether torch knows it or not."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata = header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = RawTensor(entry["dtype"], tuple(entry["shape"]), content[start + begin : start + end])
    return tensors, metadata


def raw_tensors(folder: Path) -> dict[str, RawTensor]:
    """The tensors of all files of a folder by name."""
    found: dict[str, RawTensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors, _ = read_raw(path)
        assert not found.keys() & tensors.keys()
        found |= tensors
    return found


def environment(**changes: str) -> dict[str, str]:
    """The environment with changes, for a process."""
    return {**os.environ, **changes}
