"""The helpers themselves: the hub against the real client, the builders against the stock libraries."""

import http.client
import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.checkpoints import (
    big_llama_checkpoint,
    llama_checkpoint,
    write_raw_safetensors,
    write_safetensors,
)
from tests.support.hub import OUTSIDER_TOKEN, OWNER_TOKEN, HubRepo, HubServer
from tests.support.smollm2 import smollm2_checkpoint

PROLOGUE = """
import json, sys
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
api = HfApi()
"""

Client = Callable[..., Any]


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Return the model that stock transformers makes of a folder, and its report on the tensors."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = loaded
    return model, report


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A sharded checkpoint with an empty file and a file in a folder."""
    sidecars: dict[str, str | bytes] = {
        "original/notes é.txt": "text\n",
        "empty": b"",
        "README.md": "# Model\n",
    }
    return llama_checkpoint(tmp_path / "model", shards=3, vocab=5000, extra_sidecars=sidecars)


@pytest.fixture
def hub(model: Path, tmp_path: Path) -> Iterator[HubServer]:
    """Two revisions of an open repository, and the same folder gated and private."""
    other = llama_checkpoint(tmp_path / "other", seed=1)
    repos = {
        "org/open": HubRepo(model, revisions={"experiments/one": other}),
        "legacy": HubRepo(model),
        "org/gated": HubRepo(model, gated=True),
        "org/private": HubRepo(model, private=True),
    }
    with HubServer(repos) as server:
        yield server


@pytest.fixture
def client(hub: HubServer, tmp_path: Path) -> Client:
    """Run code with the real client in a process of its own; return what it prints, read as JSON."""

    def run(code: str, *arguments: object, token: str | None = None) -> Any:  # noqa: ANN401
        environment = hub.client_environment(tmp_path / "hf-home", token=token)
        command = [sys.executable, "-c", PROLOGUE + code, *map(str, arguments)]
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert finished.returncode == 0, finished.stderr
        return json.loads(finished.stdout)

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and ".cache" not in path.parts
    }


# -- Reading from the hub


@pytest.mark.parametrize("repo_id", ["org/open", "legacy"])
def test_snapshot_has_identical_bytes(hub: HubServer, client: Client, model: Path, repo_id: str) -> None:
    folder = client("print(json.dumps(snapshot_download(sys.argv[1])))", repo_id)
    assert contents(Path(folder)) == contents(model)
    assert len(contents(model)) == 8
    for name, content in contents(model).items():
        assert hub.bytes_served(repo_id, name) == len(content)


def test_a_branch_with_a_slash_and_its_commit_name_the_same_files(
    client: Client, hub: HubServer, tmp_path: Path
) -> None:
    code = """
info = api.model_info("org/open", revision="experiments/one")
folders = [snapshot_download("org/open", revision=name) for name in ("experiments/one", info.sha)]
branches = {branch.name: branch.target_commit for branch in api.list_repo_refs("org/open").branches}
print(json.dumps([info.sha, folders, branches, api.model_info("org/open").sha]))
"""
    sha, folders, branches, main = client(code)
    assert branches == {"main": main, "experiments/one": sha}
    assert sha != main
    assert folders[0] == folders[1]
    assert contents(Path(folders[0])) == contents(tmp_path / "other")


def test_listings_name_every_file_with_its_size(client: Client, model: Path) -> None:
    code = """
info = api.model_info("org/open", files_metadata=True)
tree = list(api.list_repo_tree("org/open", recursive=True))
print(json.dumps({
    "siblings": {file.rfilename: file.size for file in info.siblings},
    "names": api.list_repo_files("org/open"),
    "tree": {item.path: getattr(item, "size", None) for item in tree},
    "top": [item.path for item in api.list_repo_tree("org/open")],
    "inner": [item.path for item in api.list_repo_tree("org/open", "original")],
    "some": [item.path for item in api.get_paths_info("org/open", ["config.json", "absent"])],
    "expanded": [api.model_info("org/open", expand=["sha"]).sha == info.sha, info.gated, info.private],
}))
"""
    found = client(code)
    sizes = {name: len(content) for name, content in contents(model).items()}
    assert found["siblings"] == sizes
    assert sorted(found["names"]) == sorted(sizes)
    assert found["tree"] == sizes | {"original": None}
    assert sorted(found["top"]) == sorted({name.split("/")[0] for name in sizes})
    assert found["inner"] == ["original/notes é.txt"]
    assert found["some"] == ["config.json"]
    assert found["expanded"] == [True, False, False]


def test_reading_headers_transfers_only_ranges(client: Client, hub: HubServer, tmp_path: Path) -> None:
    small = {f"small.{number}": torch.zeros(600_000) for number in range(2)}
    wide = small | {f"a_tensor_with_a_rather_long_name.{number:0100}": torch.zeros(1) for number in range(1000)}
    folder = tmp_path / "weights"
    for name, tensors in (("small", small), ("wide", wide)):
        write_safetensors(folder / f"{name}.safetensors", tensors)
    hub.repos["org/weights"] = HubRepo(folder)
    code = """
headers = {
    name: api.parse_safetensors_file_metadata("org/weights", name)
    for name in ("small.safetensors", "wide.safetensors")
}
print(json.dumps({name: sorted(header.tensors) for name, header in headers.items()}))
"""
    names = client(code)
    assert names == {"small.safetensors": sorted(small), "wide.safetensors": sorted(wide)}
    with (folder / "wide.safetensors").open("rb") as stream:
        header_length = int.from_bytes(stream.read(8), "little")
    assert header_length > 100_000, "the client asks for that much at first: it must need a second request"
    # 100,001 bytes (0-100000) are the client's first request; the second is exactly the header.
    assert hub.bytes_served("org/weights", "small.safetensors") == 100_001
    assert hub.bytes_served("org/weights", "wide.safetensors") == 100_001 + header_length
    content_requests = [request for request in hub.requests if request.filename]
    assert [request.status for request in content_requests] == [206, 206, 206]
    assert all(request.range and request.from_storage for request in content_requests)


ERRORS = """
def upload(repo_id, content=b"x", name="x", **options):
    api.upload_file(path_or_fileobj=content, path_in_repo=name, repo_id=repo_id, **options)

found = {}
for call in sys.argv[1:]:
    try:
        eval(call)
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        found[call] = f"{type(error).__name__} {status}"
    else:
        found[call] = None
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (
            None,
            {
                'hf_hub_download("org/gated", "config.json")': "GatedRepoError 401",
                'api.parse_safetensors_file_metadata("org/gated", "model-00001-of-00003.safetensors")':
                    "GatedRepoError 401",
                'api.model_info("org/gated")': None,
                'api.list_repo_files("org/gated")': None,
                'api.model_info("org/private")': "RepositoryNotFoundError 401",
                'snapshot_download("org/private")': "RepositoryNotFoundError 401",
                'api.model_info("org/absent")': "RepositoryNotFoundError 401",
                'api.model_info("org/open", revision="absent")': "RevisionNotFoundError 404",
                'snapshot_download("org/open", revision="absent")': "RevisionNotFoundError 404",
                'hf_hub_download("org/open", "config.json", revision="absent")': "RevisionNotFoundError 404",
                'hf_hub_download("org/open", "absent.json")': "RemoteEntryNotFoundError 404",
                'list(api.list_repo_tree("org/open", "absent"))': "RemoteEntryNotFoundError 404",
                'api.list_repo_commits("org/open")': "HfHubHTTPError 501",
            },
        ),
        (
            OUTSIDER_TOKEN,
            {
                'hf_hub_download("org/gated", "config.json")': "GatedRepoError 403",
                'api.auth_check("org/gated")': "GatedRepoError 403",
                'api.model_info("org/private")': "RepositoryNotFoundError 404",
                'api.model_info("org/open")': None,
            },
        ),
        (
            OWNER_TOKEN,
            {
                'hf_hub_download("org/gated", "config.json")': None,
                'api.auth_check("org/gated")': None,
                'snapshot_download("org/private")': None,
                'hf_hub_download("org/absent", "config.json")': "RepositoryNotFoundError 404",
                'api.whoami()["name"]': None,
            },
        ),
        ("hf_unknown", {'api.model_info("org/open")': "HfHubHTTPError 401"}),
    ],
)  # fmt: skip
def test_the_client_raises_its_own_errors(client: Client, token: str | None, expected: dict[str, str | None]) -> None:
    assert client(ERRORS, *expected, token=token) == expected


def test_the_token_stays_on_the_hub(client: Client, hub: HubServer, model: Path) -> None:
    folder = client('print(json.dumps(snapshot_download("org/private")))', token=OWNER_TOKEN)
    assert contents(Path(folder)) == contents(model)
    tokens = {from_storage: set[str | None]() for from_storage in (True, False)}
    for request in hub.requests:
        if "agent-harnesses" not in request.path:
            tokens[request.from_storage].add(request.token)
    assert tokens == {True: {None}, False: {OWNER_TOKEN}}


@pytest.mark.parametrize(
    ("header", "status", "expected"),
    [
        (None, 200, slice(None)),
        ("bytes=0-0", 206, slice(0, 1)),
        ("bytes=10-19", 206, slice(10, 20)),
        ("bytes=20-", 206, slice(20, None)),
        ("bytes=-7", 206, slice(-7, None)),
        ("bytes=20-100000000", 206, slice(20, None)),
        ("bytes=100000000-", 416, None),
        ("bytes=20-10", 416, None),
        ("bytes=-0", 416, None),
        ("pages=1-2", 200, slice(None)),
    ],
)
def test_ranges(hub: HubServer, model: Path, header: str | None, status: int, expected: slice | None) -> None:
    connection = http.client.HTTPConnection(urlsplit(hub.url).netloc, timeout=30)
    headers = {"Range": header} if header else {}
    connection.request("GET", "/org/open/resolve/main/config.json", headers=headers)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    content = (model / "config.json").read_bytes()
    assert response.status == status
    if expected is None:
        assert response.getheader("Content-Range") == f"bytes */{len(content)}"
        assert hub.bytes_served("org/open", "config.json") == 0
        return
    assert body == content[expected]
    assert hub.bytes_served("org/open", "config.json") == len(body)
    if status == 206:
        start, stop, _ = expected.indices(len(content))
        assert response.getheader("Content-Range") == f"bytes {start}-{stop - 1}/{len(content)}"


def test_the_log_can_be_cleared(hub: HubServer, client: Client) -> None:
    client('print(json.dumps(hf_hub_download("org/open", "config.json")))')
    assert hub.bytes_served("org/open", "config.json") > 0
    hub.clear_log()
    assert hub.requests == ()


def test_only_the_loopback_address_is_bound(hub: HubServer) -> None:
    for url in (hub.url, hub._storage_url):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
        # 127.0.0.2 is this machine too: a server on all addresses would answer.
        with pytest.raises(OSError, match=r"refused|assign|unreachable|timed out"):
            socket.create_connection(("127.0.0.2", urlsplit(url).port or 0), timeout=5).close()


# -- Uploading to the hub


UPLOAD = """
url = api.create_repo("owner/new", private=True)
commit = api.upload_folder(repo_id="owner/new", folder_path=sys.argv[1])
print(json.dumps([str(url), commit.oid, api.model_info("owner/new").sha, snapshot_download("owner/new")]))
"""


def test_an_uploaded_folder_can_be_read_back(hub: HubServer, client: Client, model: Path) -> None:
    (model / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Model\n", encoding="utf-8")
    url, commit, sha, snapshot = client(UPLOAD, model, token=OWNER_TOKEN)
    assert url == f"{hub.url}/owner/new"
    assert commit == sha
    assert contents(Path(snapshot)) == contents(model)
    assert contents(hub.repos["owner/new"].path) == contents(model)
    assert hub.repos["owner/new"].private
    uploads = [request for request in hub.requests if request.method == "PUT"]
    assert len(uploads) == 3, "the shards go to the storage, the small files into the commit"
    assert all(request.from_storage and request.token is None for request in uploads)


def test_a_second_upload_sends_only_what_changed(hub: HubServer, client: Client, model: Path) -> None:
    client(UPLOAD, model, token=OWNER_TOKEN)
    hub.clear_log()
    (model / "config.json").write_text("{}\n", encoding="utf-8")
    (model / "original" / "notes é.txt").unlink()
    code = """
api.create_repo("owner/new", exist_ok=True)
api.upload_folder(repo_id="owner/new", folder_path=sys.argv[1], delete_patterns="original/*")
print("null")
"""
    client(code, model, token=OWNER_TOKEN)
    assert [request for request in hub.requests if request.method == "PUT"] == []
    assert contents(hub.repos["owner/new"].path) == contents(model)
    commits = [request for request in hub.requests if "/commit/" in request.path]
    client(code, model, token=OWNER_TOKEN)
    assert commits == [request for request in hub.requests if "/commit/" in request.path], "nothing changed"
    assert len(commits) == 1


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (
            None,
            {
                'api.create_repo("owner/new")': "HfHubHTTPError 401",
                'upload("org/open")': "RepositoryNotFoundError 401",
            },
        ),
        (
            OUTSIDER_TOKEN,
            {
                'api.create_repo("owner/new")': "HfHubHTTPError 403",
                'upload("org/open")': "HfHubHTTPError 403",
            },
        ),
        (
            OWNER_TOKEN,
            {
                'api.create_repo("org/open")': "HfHubHTTPError 409",
                'api.create_repo("org/open", exist_ok=True)': None,
                'upload("org/absent")': "RepositoryNotFoundError 404",
                'upload("org/open", revision="absent")': "RevisionNotFoundError 404",
                'upload("org/open", parent_commit="0" * 40)': "HfHubHTTPError 412",
                'upload("org/open", b"---\\na: [\\n---\\n", "README.md")': "ValueError None",
                'api.delete_file("absent", "org/open")': "RemoteEntryNotFoundError 404",
            },
        ),
    ],
)  # fmt: skip
def test_a_refused_upload_changes_nothing(
    hub: HubServer, client: Client, model: Path, token: str | None, expected: dict[str, str | None]
) -> None:
    before, repos = contents(model), set(hub.repos)
    assert client(ERRORS, *expected, token=token) == expected
    assert contents(model) == before
    assert set(hub.repos) == repos


def test_a_commit_cannot_leave_its_repository(hub: HubServer, tmp_path: Path) -> None:
    lines = [
        {"key": "header", "value": {"summary": "x", "description": ""}},
        {"key": "file", "value": {"path": "fine.txt", "content": "eA==", "encoding": "base64"}},
        {"key": "file", "value": {"path": "../outside.txt", "content": "eA==", "encoding": "base64"}},
    ]
    connection = http.client.HTTPConnection(urlsplit(hub.url).netloc, timeout=30)
    body = "".join(json.dumps(line) + "\n" for line in lines)
    headers = {"Authorization": f"Bearer {OWNER_TOKEN}"}
    connection.request("POST", "/api/models/org/open/commit/main", body=body, headers=headers)
    assert connection.getresponse().status == 400
    connection.close()
    assert not (tmp_path / "outside.txt").exists()
    assert not (hub.repos["org/open"].path / "fine.txt").exists()


# -- Checkpoints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_heads": 2, "bias": True},
        {"kv_heads": 1, "tied": True, "shards": 2},
        {"head_dim": None, "hidden": 48, "shards": 5},
    ],
)
def test_stock_transformers_loads_every_tensor(tmp_path: Path, options: dict[str, Any], dtype: torch.dtype) -> None:
    folder = llama_checkpoint(tmp_path, dtype=dtype, **options)
    model, report = load(folder)
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not report[problem], problem
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == dtype
    stored: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        stored |= load_file(path)
    assert ("lm_head.weight" in stored) is not options.get("tied", False)
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())
    attention = model.model.layers[0].self_attn
    rows = attention.head_dim * options.get("kv_heads", 6)
    assert attention.k_proj.weight.shape == (rows, options.get("hidden", 36))
    assert (attention.v_proj.bias is not None) is options.get("bias", False)
    with torch.no_grad():
        assert model(torch.arange(5)[None]).logits.isfinite().all()


def test_shards_hold_the_tensors_of_the_single_file(tmp_path: Path) -> None:
    whole = load_file(llama_checkpoint(tmp_path / "whole", seed=3) / "model.safetensors")
    for shards in (2, 3, len(whole)):
        folder = llama_checkpoint(tmp_path / str(shards), seed=3, shards=shards)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(whole)
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
        assert len(set(index["weight_map"].values())) == shards
        for path in folder.glob("*.safetensors"):
            for name, tensor in load_file(path).items():
                assert index["weight_map"][name] == path.name
                assert torch.equal(tensor, whole[name])
    with pytest.raises(ValueError, match="do not fill"):
        llama_checkpoint(tmp_path / "too-many", shards=len(whole) + 1)


def test_other_seeds_give_other_weights_and_all_heads_differ(tmp_path: Path) -> None:
    first, second = (load_file(llama_checkpoint(tmp_path / str(n), seed=n) / "model.safetensors") for n in (0, 1))
    assert not any(torch.equal(first[name], second[name]) for name in first)
    heads = first["model.layers.0.self_attn.k_proj.weight"].reshape(6, 8, 36)
    assert all(not torch.equal(heads[a], heads[b]) for a in range(6) for b in range(a))


@pytest.mark.parametrize(("metadata", "expected"), [(None, {"format": "pt"}), ({"a": "b"}, {"a": "b"}), ({}, None)])
def test_metadata_of_a_written_file(
    tmp_path: Path, metadata: dict[str, str] | None, expected: dict[str, str] | None
) -> None:
    path = write_safetensors(tmp_path / "deep" / "file.safetensors", {"a": torch.ones(2)}, metadata)
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == expected


def test_a_raw_file_is_what_it_is_told_to_be(tmp_path: Path) -> None:
    body = torch.tensor([1.0, 2.0])
    header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    path = write_raw_safetensors(tmp_path / "good", header, body.numpy().tobytes())
    assert torch.equal(load_file(path)["a"], body)
    exact = save({"a": body})
    length = int.from_bytes(exact[:8], "little")
    assert write_raw_safetensors(tmp_path / "same", exact[8 : 8 + length], exact[8 + length :]).read_bytes() == exact
    for malformed in (
        write_raw_safetensors(tmp_path / "truncated", header, b"\0" * 7),
        write_raw_safetensors(tmp_path / "too-long", header, b"\0" * 8, header_length=2**40),
        write_raw_safetensors(tmp_path / "garbage", b"{not json"),
    ):
        with pytest.raises(SafetensorError):
            load_file(malformed)


MEASURED = """
import resource, sys
from pathlib import Path
from tests.support.checkpoints import big_llama_checkpoint
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
big_llama_checkpoint(Path(sys.argv[1]), 0.25, shards=3)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_big_checkpoint_is_written_in_little_memory(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    root = Path(__file__).parents[1]
    finished = subprocess.run(
        [sys.executable, "-c", MEASURED, str(tmp_path)], cwd=root, capture_output=True, text=True, check=True
    )
    grown_kib = int(finished.stdout) / (1024 if sys.platform == "darwin" else 1)
    assert grown_kib < 80 * 1024, "of 256 MiB"
    config = json.loads((tmp_path / "config.json").read_text())
    total = 0
    for path in sorted(tmp_path.glob("*.safetensors")):
        total += sum(tensor.nbytes for tensor in load_file(path).values())
    assert 0 <= 2**28 - total < 4 * config["hidden_size"]
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    model, report = load(tmp_path)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    keys = model.model.layers[0].self_attn.k_proj.weight
    heads = keys.unflatten(0, (config["num_key_value_heads"], config["head_dim"]))
    assert all(not torch.equal(heads[0], head) for head in heads[1:])
    assert heads.float().std().item() == pytest.approx(0.02, rel=0.01)


@pytest.mark.parametrize(("gib", "layers", "hidden"), [(0.001, 2, 128), (0.125, 4, 1024), (1, 2, 4096)])
def test_the_sizes_of_big_checkpoints(gib: float, layers: int, hidden: int) -> None:
    from tests.support.checkpoints import _fitting_shape

    shape = _fitting_shape(round(gib * 2**29))
    assert 0 <= gib * 2**29 - shape.parameters() < 2 * hidden + 1
    assert shape.layers >= layers
    assert shape.hidden == hidden
    assert shape.heads == shape.kv_heads == hidden // shape.head_dim


def test_a_big_checkpoint_cannot_be_tiny(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="too few"):
        big_llama_checkpoint(tmp_path, 1e-5)


# -- The real model


@pytest.mark.real
def test_the_real_model_is_trained() -> None:
    folder = smollm2_checkpoint()
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (9, 3, 64)
    assert (config["num_hidden_layers"], config["vocab_size"], config["dtype"]) == (30, 49152, "bfloat16")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model, _ = load(folder)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert text.strip() == "The capital of France is Paris."
