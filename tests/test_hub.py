"""Hub ids: the real client against a hub on the loopback interface, each command in a process of its own.

The client reads its settings when it is imported, so every command gets a fresh one; the processes are forked from a
server that has torch and the package loaded already, which saves seconds each.
"""

import json
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.checkpoints import llama_checkpoint, write_raw_safetensors
from tests.support.hub import OUTSIDER_TOKEN, OWNER_TOKEN, HubRepo, HubServer
from tests.support.runs import INDEX, SINGLE, edit_config, invoke, read_json, tree, write_json

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    root = tmp_path_factory.mktemp("hub")
    # Weights of 400 kB and more: far more than the first range request takes.
    single = llama_checkpoint(root / "single", vocab=2000, extra_sidecars={"tokenizer.json": "{}"})
    sharded = llama_checkpoint(root / "sharded", vocab=2000, shards=2, extra_sidecars={"README.md": "# A model\n"})
    other = llama_checkpoint(root / "other", layers=3)
    no_config = llama_checkpoint(root / "no-config")
    (no_config / "config.json").unlink()
    no_shard = llama_checkpoint(root / "no-shard", shards=2)
    (no_shard / SHARDS[1]).unlink()
    pickled = root / "pickled"
    write_json(pickled / "config.json", {"model_type": "llama"})
    (pickled / "pytorch_model.bin").write_bytes(bytes(300_000))
    long_header = root / "long"
    write_json(long_header / "config.json", read_json(single / "config.json"))
    table = {f"x.{'y' * 100}.{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(1500)}
    write_raw_safetensors(long_header / SINGLE, table, bytes(1500))
    repos = {
        "org/single": HubRepo(single, revisions={"v2": other}),
        "org/sharded": HubRepo(sharded),
        "org/gated": HubRepo(single, gated=True),
        "org/private": HubRepo(single, private=True),
        "org/no-config": HubRepo(no_config),
        "org/no-shard": HubRepo(no_shard),
        "org/pickled": HubRepo(pickled),
        "org/long": HubRepo(long_header),
    }
    with HubServer(repos) as server:
        yield server


FORKS = multiprocessing.get_context("forkserver")
# httpx is what clients before 2.0 use; what is not installed is passed over.
FORKS.set_forkserver_preload(["gqaconvert.merge.execute", "tests.support.runs", "httpx2", "httpx", "yaml"])


class Run(NamedTuple):
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


def in_child(answer: Connection, arguments: list[str], settings: dict[str, str], folder: Path) -> None:
    os.environ.clear()
    os.environ.update(settings)
    os.chdir(folder)
    result = invoke(*arguments)
    answer.send(Run(result.exit_code, result.stdout, result.stderr))


class Client:
    """The command line with a cache of its own, outside of any repository."""

    def __init__(self, hub: HubServer, folder: Path) -> None:
        self.hub, self.folder = hub, folder
        hub.clear_log()

    def __call__(self, *arguments: object, token: str | None = None, **environment: str) -> Run:
        settings = self.hub.client_environment(self.folder / "home", token=token) | environment
        receiver, sender = FORKS.Pipe(duplex=False)
        arguments_text = [str(argument) for argument in arguments]
        child = FORKS.Process(target=in_child, args=(sender, arguments_text, settings, self.folder))
        child.start()
        sender.close()
        try:
            run: Run = receiver.recv()  # the child's own traceback goes to stderr if there is no answer
        finally:
            child.join(120)
        return run

    def done(self, *arguments: object, **options: Any) -> Run:  # noqa: ANN401
        run = self(*arguments, **options)
        assert run.returncode == 0, run.stderr
        return run

    def fails(self, exit_code: int, *arguments: object, **options: Any) -> str:  # noqa: ANN401
        run = self(*arguments, **options)
        assert run.returncode == exit_code, run.stderr
        lines = run.stderr.splitlines()
        assert [line.partition(":")[0] for line in lines] in (["error"], ["error", "hint"]), run.stderr
        assert run.stdout == ""
        assert not (self.folder / "target").exists()
        return run.stderr


@pytest.fixture
def client(hub: HubServer, tmp_path: Path) -> Client:
    return Client(hub, tmp_path)


def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


# ---- Reading


def test_inspect_transfers_json_and_headers_only(hub: HubServer, client: Client) -> None:
    document = json.loads(client.done("inspect", "org/sharded", "--json").stdout)
    local = json.loads(client.done("inspect", hub.repos["org/sharded"].path, "--json").stdout)
    assert document["revision"] is not None
    assert document["source"] == "org/sharded"
    assert document | {"source": "", "revision": ""} == local | {"source": "", "revision": ""}
    for name in SHARDS:
        content = [r for r in hub.requests if r.filename == name]
        assert [request.range for request in content] == ["bytes=0-99999"]
        assert hub.bytes_served("org/sharded", name) <= 100_000
    for request in hub.requests:
        assert request.filename in (None, *SHARDS, "config.json", INDEX)


def test_estimate_transfers_config_and_headers_only(hub: HubServer, client: Client) -> None:
    document = json.loads(client.done("estimate", "org/sharded", "--context", "256", "--json").stdout)
    local = json.loads(client.done("estimate", hub.repos["org/sharded"].path, "--context", "256", "--json").stdout)
    assert document | {"source": ""} == local | {"source": ""}
    assert {request.range for request in hub.requests if request.filename in SHARDS} == {"bytes=0-99999"}


def test_validate_two_repositories(hub: HubServer, client: Client) -> None:
    client.done("convert", "org/single", "converted", "--mqa")
    hub.repos["org/converted"] = HubRepo(client.folder / "converted")
    document = json.loads(client.done("validate", "org/single", "org/converted", "--level", "files", "--json").stdout)
    assert {check["status"] for check in document["checks"]} == {"passed"}


def test_a_long_header_costs_one_more_request(hub: HubServer, client: Client) -> None:
    path = hub.repos["org/long"].path / SINGLE
    length = int.from_bytes(path.read_bytes()[:8], "little")
    assert length > 100_000
    document = json.loads(client.done("inspect", "org/long", "--json").stdout)
    assert document["parameters"] == 1500
    content = [request for request in hub.requests if request.filename == SINGLE]
    assert len(content) == 2
    assert sum(request.body_bytes for request in content) == 100_000 + length


def test_revision(hub: HubServer, client: Client) -> None:
    found = [
        json.loads(client.done("inspect", "org/single", "--json", *options).stdout)
        for options in ((), ("--revision", "main"), ("--revision", "v2"))
    ]
    assert [document["num_hidden_layers"] for document in found] == [2, 2, 3]
    commit = found[2]["revision"]
    assert commit != found[0]["revision"] == found[1]["revision"]
    by_commit = json.loads(client.done("inspect", "org/single", "--json", "--revision", commit).stdout)
    assert by_commit == found[2]


def test_a_local_folder_makes_no_call(hub: HubServer, client: Client) -> None:
    source = hub.repos["org/single"].path
    client.done("inspect", source)
    client.done("convert", source, client.folder / "target", "--mqa")
    (client.folder / "org").mkdir()
    (client.folder / "org" / "single").symlink_to(source)
    client.done("inspect", "org/single")  # a folder of this name hides the repository
    assert hub.requests == ()


def test_revision_of_a_local_folder_is_refused(hub: HubServer, client: Client) -> None:
    assert "--revision" in client.fails(2, "inspect", hub.repos["org/single"].path, "--revision", "main")


# ---- Converting


@pytest.mark.parametrize("repo", ["org/single", "org/sharded"])
def test_convert_records_where_it_came_from(hub: HubServer, client: Client, repo: str) -> None:
    commit = json.loads(client.done("inspect", repo, "--json").stdout)["revision"]
    client.done("convert", repo, "target", "--mqa")
    record = read_json(client.folder / "target" / "gqaconvert.json")
    assert (record["source"]["id"], record["source"]["revision"]) == (repo, commit)
    card = (client.folder / "target" / "README.md").read_text()
    assert f"\nbase_model: {repo}\n" in card
    assert commit in card
    client.done("convert", hub.repos[repo].path, "local", "--mqa")
    made, local = tree(client.folder / "target"), tree(client.folder / "local")
    assert made.keys() == local.keys()
    differing = {name for name in made if made[name] != local[name]}
    assert differing == {"README.md", "gqaconvert.json"}


def test_convert_of_a_revision(client: Client) -> None:
    client.done("convert", "org/single", "target", "--mqa", "--revision", "v2")
    assert read_json(client.folder / "target" / "config.json")["num_hidden_layers"] == 3


def test_a_dry_run_fetches_no_weights(hub: HubServer, client: Client) -> None:
    client.done("convert", "org/sharded", "target", "--mqa", "--dry-run")
    assert all(hub.bytes_served("org/sharded", name) <= 100_000 for name in SHARDS)


def test_pickles_are_refused_before_anything_travels(hub: HubServer, client: Client) -> None:
    for command in (("inspect", "org/pickled"), ("convert", "org/pickled", "target", "--mqa")):
        assert "pickle" in client.fails(2, *command)
    assert all(request.filename is None for request in hub.requests)


# ---- What can go wrong

Command = Callable[[str], tuple[str, ...]]
COMMANDS: dict[str, Command] = {
    "inspect": lambda repo: ("inspect", repo),
    "convert": lambda repo: ("convert", repo, "target", "--mqa"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("repo", "token", "exit_code", "words"),
    [
        ("org/gated", None, 3, ("gated", "hf auth login")),
        ("org/gated", OUTSIDER_TOKEN, 3, ("gated", "hf auth login")),
        ("org/private", None, 2, ("org/private", "private repository", "hf auth login")),
        ("org/missing", OWNER_TOKEN, 2, ("org/missing", "spelling")),
        ("org/no-config", None, 2, ("config.json",)),
    ],
)
def test_access(
    client: Client, command: str, repo: str, token: str | None, exit_code: int, words: tuple[str, ...]
) -> None:
    message = client.fails(exit_code, *COMMANDS[command](repo), token=token)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("repo", ["org/gated", "org/private"])
def test_the_owner_reads_all(client: Client, repo: str) -> None:
    client.done("inspect", repo, token=OWNER_TOKEN)
    client.done("convert", repo, "target", "--mqa", token=OWNER_TOKEN)


@pytest.mark.parametrize("command", COMMANDS)
def test_missing_revision(client: Client, command: str) -> None:
    assert "'v99'" in client.fails(2, *COMMANDS[command]("org/single"), "--revision", "v99")


def test_missing_shard(client: Client) -> None:
    document = json.loads(client.done("inspect", "org/no-shard", "--json").stdout)
    assert [p["code"] for p in document["problems"] if p["severity"] == "error"] == ["missing-shard"]
    assert SHARDS[1] in client.fails(2, "convert", "org/no-shard", "target", "--mqa")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_network(client: Client, command: str) -> None:
    message = client.fails(3, *COMMANDS[command]("org/single"), HF_ENDPOINT=closed_port())
    assert "network" in message


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("switch", ["--offline", "HF_HUB_OFFLINE"])
def test_offline_without_a_copy(hub: HubServer, client: Client, command: str, switch: str) -> None:
    arguments = COMMANDS[command]("org/single")
    if switch == "--offline":
        message = client.fails(3, *arguments, switch)
    else:
        message = client.fails(3, *arguments, HF_HUB_OFFLINE="1")
    assert "local cache" in message
    assert hub.requests == ()


def test_offline_with_a_copy(hub: HubServer, client: Client) -> None:
    client.done("convert", "org/sharded", "first", "--mqa")
    hub.clear_log()
    client.done("inspect", "org/sharded", "--offline")
    client.done("inspect", "org/sharded", HF_HUB_OFFLINE="1")
    client.done("convert", "org/sharded", "second", "--mqa", "--offline")
    client.done("convert", "org/sharded", "third", "--mqa", HF_HUB_OFFLINE="1", HF_ENDPOINT=closed_port())
    assert tree(client.folder / "first") == tree(client.folder / "second") == tree(client.folder / "third")
    assert hub.requests == ()


@pytest.mark.parametrize("lost", [*SHARDS, "config.json", "all weights"])
def test_offline_with_a_part_of_a_copy(client: Client, lost: str) -> None:
    client.done("convert", "org/sharded", "first", "--mqa")
    (snapshot,) = (client.folder / "home" / "hub" / "models--org--sharded" / "snapshots").iterdir()
    for name in (*SHARDS, INDEX) if lost == "all weights" else (lost,):
        (snapshot / name).unlink()
    # Clients before 2.4 keep no list of files, and would hand out what is there.
    for listing in snapshot.parent.parent.glob("trees/*"):
        listing.unlink()
    for command in COMMANDS.values():
        assert "local cache" in client.fails(3, *command("org/sharded"), "--offline")
    client.done("convert", "org/sharded", "second", "--mqa")
    assert tree(client.folder / "first") == tree(client.folder / "second")


@pytest.mark.parametrize("name", ["a b", "a//b", "x" * 200, "--x/y", "a/b/c", "org/..", "org/a\nb", "ünïcode"])
def test_what_is_no_repository_id_is_not_asked_for(hub: HubServer, client: Client, name: str) -> None:
    client.fails(2, "inspect", "--", name)
    assert all("/revision/" in request.path or request.path.startswith("/api/models/") for request in hub.requests)


# ---- Uploading


def test_push_and_read_back(hub: HubServer, client: Client) -> None:
    run = client.done(
        "convert", "org/sharded", "target", "--mqa", "--push-to-hub", "org/pushed", "--json", token=OWNER_TOKEN
    )
    assert json.loads(run.stdout)["commit_url"].startswith(f"{hub.url}/org/pushed/commit/")
    made = tree(client.folder / "target")
    assert tree(hub.repos["org/pushed"].path) == made
    document = json.loads(client.done("inspect", "org/pushed", "--json").stdout)
    assert document["attention"] == "MQA"
    assert document["provenance"]["source"]["id"] == "org/sharded"


@pytest.mark.parametrize("token", [None, OUTSIDER_TOKEN])
@pytest.mark.parametrize("repo", ["org/single", "org/new"])
def test_push_without_the_right(hub: HubServer, client: Client, token: str | None, repo: str) -> None:
    before = tree(hub.repos["org/single"].path)
    run = client("convert", "org/sharded", "target", "--mqa", "--push-to-hub", repo, token=token)
    assert run.returncode == 3, run.stderr
    assert run.stderr.splitlines()[0].startswith("error: ")
    assert "Traceback" not in run.stderr
    assert "hf auth login" in run.stderr
    assert "target is complete" in run.stderr
    assert (client.folder / "target" / "config.json").is_file()
    assert tree(hub.repos["org/single"].path) == before
    assert "org/new" not in hub.repos


def test_push_to_what_is_no_repository_is_refused_first(client: Client) -> None:
    assert "--push-to-hub" in client.fails(2, "convert", "org/single", "target", "--mqa", "--push-to-hub", "a/b/c")


def test_a_changed_config_on_the_hub_is_seen(hub: HubServer, client: Client, tmp_path: Path) -> None:
    folder = llama_checkpoint(tmp_path / "moving", dtype=torch.bfloat16)
    hub.repos["org/moving"] = HubRepo(folder)
    first = json.loads(client.done("inspect", "org/moving", "--json").stdout)
    edit_config(folder, sliding_window=77)
    second = json.loads(client.done("inspect", "org/moving", "--json").stdout)
    assert (first["sliding_window"], second["sliding_window"]) == (None, 77)
    assert first["revision"] != second["revision"]
