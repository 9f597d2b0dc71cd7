"""What a command imports and touches, seen from inside a fresh process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import llama_checkpoint
from tests.support.runs import raw_tensors

HEAVY = {"torch", "transformers", "huggingface_hub", "numpy", "yaml", "jinja2", "safetensors"}

REPORT = """
import atexit, json, sys
target = sys.argv[1]
atexit.register(lambda: open(target, "w").write(json.dumps(sorted({m.partition(".")[0] for m in sys.modules}))))
sys.argv = ["gqaconvert", *sys.argv[2:]]
from gqaconvert.cli.app import main
main()
"""

NO_SOCKETS = """
import socket, sys
class Forbidden(socket.socket):
    def __init__(self, *args, **kwargs):
        raise AssertionError("a socket was opened")
def forbidden(*args, **kwargs):
    raise AssertionError("the network was asked")
socket.socket = Forbidden
socket.create_connection = socket.getaddrinfo = socket.gethostbyname = forbidden
asked = ("socket.__new__", "socket.connect", "socket.getaddrinfo", "socket.bind", "socket.sendto")
sys.addaudithook(lambda event, args: forbidden() if event in asked else None)
from gqaconvert.cli.app import main
main()
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return llama_checkpoint(tmp_path_factory.mktemp("startup") / "source", shards=2)


@pytest.mark.parametrize(
    "command",
    [
        "--help", "--version", "inspect --help", "convert --help", "inspect SRC", "inspect SRC --json",
        "convert SRC DST --mqa --dry-run", "convert SRC DST --mqa --dry-run --json", "convert SRC DST --kv-heads 5",
        "estimate SRC --policy l2:1/2:skip=0",
    ],
)  # fmt: skip
def test_what_needs_no_tensors_imports_no_torch(tmp_path: Path, source: Path, command: str) -> None:
    words = [word.replace("SRC", str(source)).replace("DST", str(tmp_path / "target")) for word in command.split()]
    record = tmp_path / "modules.json"
    ended = subprocess.run(
        [sys.executable, "-c", REPORT, str(record), *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == (2 if "5" in words else 0), ended.stderr
    modules = set(json.loads(record.read_text()))
    assert "gqaconvert" in modules
    assert not modules & HEAVY


@pytest.mark.parametrize("command", ["inspect SRC", "inspect SRC --json", "--help", "inspect --help"])
def test_inspect_waits_for_nothing_it_does_not_use(tmp_path: Path, source: Path, command: str) -> None:
    record = tmp_path / "modules.json"
    words = [word.replace("SRC", str(source)) for word in command.split()]
    subprocess.run([sys.executable, "-c", REPORT, str(record), *words], capture_output=True, check=True, timeout=60)
    modules = set(json.loads(record.read_text()))
    assert "typer" in modules
    assert not modules & {"pydantic", "pydantic_core", "email"}


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("inspect", 2, "missing argument"), ("inspect SRC --family", 2, "--family"), ("inspect SRC --family nothing", 2, "nothing"),
        ("inspect SRC --revision", 2, "--revision"), ("inspect SRC again", 2, "again"), ("inspect -h", 0, "--family"),
        ("--version", 0, "gqaconvert "), ("convert SRC DST --kv-heads many", 2, "integer"), ("nothing", 2, "nothing"),
    ],
)  # fmt: skip
def test_quick_parameters_refuse_what_thorough_ones_do(
    tmp_path: Path, source: Path, command: str, code: int, said: str
) -> None:
    words = [word.replace("SRC", str(source)).replace("DST", str(tmp_path / "target")) for word in command.split()]
    ended = subprocess.run(
        [sys.executable, "-m", "gqaconvert", *words], capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == code, ended.stderr
    assert said.lower() in (ended.stderr + ended.stdout).lower()
    assert "Traceback" not in ended.stderr


def test_the_package_imports_no_torch() -> None:
    script = "import gqaconvert, sys; assert gqaconvert.__version__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0


def test_a_local_conversion_opens_no_socket(tmp_path: Path, source: Path) -> None:
    # A folder in the form of a Hub id, relative to where we stand, is the folder.
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "model").symlink_to(source)
    ended = subprocess.run(
        [sys.executable, "-c", NO_SOCKETS, "convert", "org/model", str(tmp_path / "target"), "--kv-heads", "2"],
        cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert raw_tensors(tmp_path / "target").keys() == raw_tensors(source).keys()


def test_the_guard_against_sockets_works() -> None:
    script = NO_SOCKETS.replace(
        "from gqaconvert.cli.app import main\nmain()", "socket.create_connection(('127.0.0.1', 9))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=60)
    assert "the network was asked" in ended.stderr
