"""A model hub on the loopback interface, for tests with the real ``huggingface_hub`` client.

It serves folders under the protocol that the client speaks: model information and listings, ``resolve``
with range requests, gated and private repositories, and uploads by LFS and commit. As on the Hub, weights
live on another host (here another port), reached by a redirect that must not carry the token. Xet is not
spoken.

    with HubServer({"org/model": HubRepo(folder)}) as hub:
        subprocess.run([...], env=hub.client_environment(tmp_path))
        assert hub.bytes_served("org/model", "model.safetensors") < 200_000

The client reads its endpoint when it is imported, so it needs a process of its own.
"""

import base64
import binascii
import hashlib
import importlib
import io
import json
import os
import re
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

OWNER_TOKEN = "hf_owner"
"""Reads private and gated repositories, and may write."""
OUTSIDER_TOKEN = "hf_outsider"
"""A valid token without access to any private or gated repository, and without write access."""

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".onnx", ".msgpack", ".parquet")
_LFS_THRESHOLD = 10 * 2**20
_CHUNK = 2**20


@dataclass(frozen=True)
class HubRepo:
    """A repository to serve.

    Attributes:
        path: Folder that branch ``main`` holds. Its commit id follows its content, as read at each request.
        revisions: Folders of further branches and tags, by name.
        gated: Everybody sees the listing; the files need ``OWNER_TOKEN``.
        private: Nobody without ``OWNER_TOKEN`` can tell that it exists.
    """

    path: Path
    revisions: Mapping[str, Path] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def branches(self) -> dict[str, Path]:
        return {"main": self.path, **self.revisions}


@dataclass(frozen=True)
class HubRequest:
    """One answered request.

    Attributes:
        method: HTTP method.
        path: Path and query as they were sent.
        status: HTTP status of the answer.
        range: The ``Range`` header, if any.
        body_bytes: Bytes of the answer's body that were written to the connection.
        repo_id: Repository, if the request was for content of one file.
        filename: That file's path in the repository.
        token: The bearer token that came with it, if any.
        from_storage: Whether it reached the storage host instead of the hub.
    """

    method: str
    path: str
    status: int
    range: str | None
    body_bytes: int
    repo_id: str | None
    filename: str | None
    token: str | None
    from_storage: bool


@dataclass(frozen=True)
class _File:
    path: Path
    size: int
    oid: str
    sha256: str | None  # set for LFS files only

    @property
    def etag(self) -> str:
        return self.sha256 or self.oid


@dataclass(frozen=True)
class _Revision:
    commit: str
    files: Mapping[str, _File]


@dataclass(frozen=True)
class _Request:
    method: str
    path: str
    query: Mapping[str, list[str]]
    range: str | None
    token: str | None
    body: bytes
    received: Path | None  # the body of a PUT

    def json(self) -> Any:  # noqa: ANN401
        return json.loads(self.body)


@dataclass(frozen=True)
class _Reply:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None  # sent instead of the body, from start to stop
    start: int = 0
    stop: int = 0
    subject: tuple[str, str] | None = None  # repository and file, for the log


class _RefusedError(Exception):
    """An answer with an error status, in the form that the client tells apart."""

    def __init__(self, status: int, code: str | None, message: str, **headers: str) -> None:
        super().__init__(message)
        extra = {"X-Error-Code": code} if code else {}
        one_line = " ".join(message.encode("ascii", "backslashreplace").decode().split())
        extra |= {"X-Error-Message": one_line, "Content-Type": "application/json"}
        extra |= {name.replace("_", "-"): value for name, value in headers.items()}
        self.reply = _Reply(status, json.dumps({"error": message}).encode(), extra)


def _json_reply(value: object, status: int = 200) -> _Reply:
    return _Reply(status, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _git_blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _lfs_pointer(sha256: str, size: int) -> bytes:
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def _is_lfs(name: str, size: int) -> bool:
    return size > 0 and (name.endswith(LFS_SUFFIXES) or size > _LFS_THRESHOLD)


def _store(target: Path, content: BinaryIO) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with content, tempfile.NamedTemporaryFile(dir=target.parent, delete=False) as sink:
        shutil.copyfileobj(content, sink, _CHUNK)
    Path(sink.name).replace(target)


def _byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """Return (start, stop) of a header with one range, None to send the whole file (RFC 9110, 14.2)."""
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "")
    if match is None or match.group() == "bytes=-":
        return None
    first, last = match.groups()
    if not first:
        start, stop = max(0, size - int(last)), size
    else:
        start, stop = int(first), min(size, int(last) + 1) if last else size
    if start >= stop:
        raise _RefusedError(416, None, f"range {header} is outside {size} bytes", Content_Range=f"bytes */{size}")
    return start, stop


class HubServer:
    """The hub: a context manager that serves in threads of this process, on 127.0.0.1 only.

    Args:
        repos: Repositories by id. An upload to one of them changes its folder.
    """

    def __init__(self, repos: Mapping[str, HubRepo] | None = None) -> None:
        self.repos: dict[str, HubRepo] = dict(repos or {})
        self._scratch = tempfile.TemporaryDirectory(prefix="gqaconvert-hub-")
        self._objects = Path(self._scratch.name, "objects")
        self._objects.mkdir()
        self._hashes: dict[tuple[str, int, int], tuple[str, str | None]] = {}
        self._log: list[HubRequest] = []
        self._busy = 0
        self._idle = threading.Condition()
        self._writing = threading.Lock()
        self._hub = _Listener(self, from_storage=False)
        self._storage = _Listener(self, from_storage=True)
        self.url = f"http://127.0.0.1:{self._hub.server_port}"
        self._storage_url = f"http://127.0.0.1:{self._storage.server_port}"

    def __enter__(self) -> Self:
        for listener in (self._hub, self._storage):
            threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener in (self._hub, self._storage):
            listener.shutdown()
            listener.server_close()
        self._scratch.cleanup()

    def client_environment(self, hf_home: Path, *, token: str | None = None) -> dict[str, str]:
        """Return the environment of a client process: this server, an own cache, no settings of the user.

        Args:
            hf_home: Folder for the client's cache.
            token: Token to send, such as ``OWNER_TOKEN``.
        """
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        environment |= {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(hf_home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "*",
            "no_proxy": "*",
        }
        return environment | ({"HF_TOKEN": token} if token else {})

    @property
    def requests(self) -> tuple[HubRequest, ...]:
        """Every request so far, in the order in which they ended."""
        with self._idle:
            # A client may have its answer before the handler's thread gets to write the log.
            if not self._idle.wait_for(lambda: self._busy == 0, timeout=30):
                raise TimeoutError("the hub is still answering a request")
            return tuple(self._log)

    def clear_log(self) -> None:
        """Forget the requests so far."""
        with self._idle:
            self._log.clear()

    def bytes_served(self, repo_id: str, filename: str) -> int:
        """Return how many bytes of a file's content were sent, over all requests in the log."""
        subject = (repo_id, filename)
        return sum(request.body_bytes for request in self.requests if (request.repo_id, request.filename) == subject)

    # -- What is on disk

    def _file(self, path: Path, name: str) -> _File:
        status = path.stat()
        key = (str(path), status.st_size, status.st_mtime_ns)
        if key not in self._hashes:
            if _is_lfs(name, status.st_size):
                sha256 = _sha256(path)
                self._hashes[key] = (_git_blob_id(_lfs_pointer(sha256, status.st_size)), sha256)
            else:
                self._hashes[key] = (_git_blob_id(path.read_bytes()), None)
        return _File(path, status.st_size, *self._hashes[key])

    def _revision_of(self, folder: Path) -> _Revision:
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        names = {path.relative_to(folder).as_posix(): path for path in paths}
        files = {name: self._file(path, name) for name, path in names.items()}
        digest = hashlib.sha1(usedforsecurity=False)
        for name, file in files.items():
            digest.update(f"{name}\0{file.oid}\n".encode())
        return _Revision(digest.hexdigest(), files)

    def _repo(self, repo_id: str, token: str | None) -> HubRepo:
        repo = self.repos.get(repo_id)
        if repo is None or (repo.private and token != OWNER_TOKEN):
            # The Hub answers alike for what is not there and for what may not be seen.
            if token is None:
                raise _RefusedError(401, "RepoNotFound", "Invalid username or password.")
            raise _RefusedError(404, "RepoNotFound", "Repository not found")
        return repo

    def _folder(self, repo: HubRepo, name: str) -> Path:
        """Return the folder of a branch, a tag or a commit id."""
        branches = repo.branches()
        if name in branches:
            return branches[name]
        for folder in branches.values():
            if self._revision_of(folder).commit == name:
                return folder
        raise _RefusedError(404, "RevisionNotFound", f"Invalid rev id: {name}")

    def _revision(self, request: _Request, repo_id: str, name: str) -> _Revision:
        return self._revision_of(self._folder(self._repo(repo_id, request.token), name))

    def _writable(self, request: _Request, repo_id: str) -> HubRepo:
        repo = self._repo(repo_id, request.token)
        if request.token is None:
            # The Hub sends no code here; the client takes a bare 401 for this one, but over https only.
            raise _RefusedError(401, "RepoNotFound", "Invalid username or password.")
        if request.token != OWNER_TOKEN:
            raise _RefusedError(403, None, f"You don't have the rights to write to {repo_id}")
        return repo

    # -- The hub's answers

    def _model_info(self, request: _Request, repo_id: str, revision: str = "main") -> _Reply:
        repo = self._repo(repo_id, request.token)
        found = self._revision(request, repo_id, revision)
        siblings: list[dict[str, object]] = []
        for name, file in found.files.items():
            sibling: dict[str, object] = {"rfilename": name}
            if "blobs" in request.query:
                sibling |= {"size": file.size, "blobId": file.oid}
                if file.sha256:
                    pointer = len(_lfs_pointer(file.sha256, file.size))
                    sibling["lfs"] = {"sha256": file.sha256, "size": file.size, "pointerSize": pointer}
            siblings.append(sibling)
        info: dict[str, object] = {"_id": hashlib.md5(repo_id.encode(), usedforsecurity=False).hexdigest()[:24]}
        info |= {"id": repo_id, "modelId": repo_id, "sha": found.commit, "siblings": siblings, "tags": []}
        info |= {"private": repo.private, "gated": "manual" if repo.gated else False, "disabled": False}
        wanted = set(request.query.get("expand", ()))
        return _json_reply(
            {name: value for name, value in info.items() if not wanted or name in wanted | {"_id", "id"}}
        )

    @staticmethod
    def _entry(name: str, file: _File) -> dict[str, object]:
        entry: dict[str, object] = {"type": "file", "path": name, "size": file.size, "oid": file.oid}
        if file.sha256:
            pointer = len(_lfs_pointer(file.sha256, file.size))
            entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": pointer}
        return entry

    def _tree(self, request: _Request, repo_id: str, revision: str, folder: str = "") -> _Reply:
        found = self._revision(request, repo_id, revision)
        recursive = request.query.get("recursive") == ["true"]
        prefix = f"{folder}/" if folder else ""
        entries: dict[str, dict[str, object]] = {}
        for name, file in found.files.items():
            if not name.startswith(prefix):
                continue
            parents = [parent.as_posix() for parent in PurePosixPath(name).parents][:-1]
            inner = [parent for parent in reversed(parents) if parent.startswith(prefix)]
            for parent in inner if recursive else inner[:1]:
                tree_id = hashlib.sha1(parent.encode(), usedforsecurity=False).hexdigest()
                entries.setdefault(parent, {"type": "directory", "path": parent, "size": 0, "oid": tree_id})
            if recursive or not inner:
                entries[name] = self._entry(name, file)
        if folder and not entries:
            raise _RefusedError(404, "EntryNotFound", f"{folder} does not exist on {revision}")
        return _json_reply(list(entries.values()))

    def _paths_info(self, request: _Request, repo_id: str, revision: str) -> _Reply:
        files = self._revision(request, repo_id, revision).files
        wanted = parse_qs(request.body.decode()).get("paths", [])
        return _json_reply([self._entry(name, files[name]) for name in wanted if name in files])

    def _refs(self, request: _Request, repo_id: str) -> _Reply:
        branches = self._repo(repo_id, request.token).branches()
        heads = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": self._revision_of(folder).commit}
            for name, folder in branches.items()
        ]
        return _json_reply({"branches": heads, "converts": [], "tags": [], "pullRequests": []})

    def _check_access(self, request: _Request, repo_id: str) -> None:
        repo = self._repo(repo_id, request.token)
        if repo.gated and request.token != OWNER_TOKEN:
            status = 401 if request.token is None else 403
            raise _RefusedError(status, "GatedRepo", f"Access to model {repo_id} is restricted.")

    def _auth_check(self, request: _Request, repo_id: str) -> _Reply:
        self._check_access(request, repo_id)
        return _json_reply({})

    def _resolve(self, request: _Request, repo_id: str, revision: str, filename: str) -> _Reply:
        self._check_access(request, repo_id)
        found = self._revision(request, repo_id, revision)
        file = found.files.get(filename)
        if file is None:
            raise _RefusedError(404, "EntryNotFound", "Entry not found", X_Repo_Commit=found.commit)
        headers = {"X-Repo-Commit": found.commit}
        if file.sha256 is None:
            return self._content(request, file, (repo_id, filename), headers)
        location = f"{self._storage_url}/{repo_id}/{found.commit}/{quote(filename)}"
        headers |= {
            "Location": location,
            "X-Linked-Size": str(file.size),
            "X-Linked-Etag": f'"{file.sha256}"',
        }
        return _Reply(302, f"Found. Redirecting to {location}".encode(), headers)

    @staticmethod
    def _content(request: _Request, file: _File, subject: tuple[str, str], headers: dict[str, str]) -> _Reply:
        headers |= {
            "ETag": f'"{file.etag}"',
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        span = _byte_range(request.range, file.size)
        if span is None:
            return _Reply(200, headers=headers, file=file.path, stop=file.size, subject=subject)
        start, stop = span
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{file.size}"
        return _Reply(206, headers=headers, file=file.path, start=start, stop=stop, subject=subject)

    def _whoami(self, request: _Request) -> _Reply:
        if request.token is None:
            raise _RefusedError(401, None, "Invalid username or password.")
        return _json_reply({"type": "user", "name": request.token.removeprefix("hf_"), "orgs": []})

    def _agent_harnesses(self, request: _Request) -> _Reply:
        return _json_reply({"standardEnvVars": [], "harnesses": {}})

    # -- Uploads

    def _create_repo(self, request: _Request) -> _Reply:
        if request.token != OWNER_TOKEN:
            status = 401 if request.token is None else 403
            raise _RefusedError(status, None, "You don't have the rights to create a model under this namespace")
        wanted = request.json()
        repo_id = f"{wanted.get('organization') or 'owner'}/{wanted['name']}"
        answer = {"url": f"{self.url}/{repo_id}", "name": repo_id}
        with self._writing:
            if repo_id in self.repos:
                return _json_reply(answer | {"error": "You already created this model repo"}, 409)
            folder = Path(self._scratch.name, "repos", repo_id)
            folder.mkdir(parents=True)
            self.repos[repo_id] = HubRepo(folder, private=wanted.get("visibility") == "private")
        return _json_reply(answer)

    def _validate_yaml(self, request: _Request) -> _Reply:
        """Answer for a README: its front matter must be a YAML mapping; without one the Hub warns."""
        yaml = importlib.import_module("yaml")
        front = re.match(r"---\r?\n(.*?)\r?\n---\s*(\n|$)", request.json()["content"], re.DOTALL)
        if front is None:
            warning = "empty or missing yaml metadata in repo card"
            return _json_reply({"errors": [], "warnings": [{"message": warning}]})
        try:
            value, problem = yaml.safe_load(front[1]), "metadata is not a mapping"
        except yaml.YAMLError as error:
            value, problem = None, str(error)
        if not isinstance(value, dict):
            return _json_reply({"error": problem, "errors": [{"message": problem}], "warnings": []}, 400)
        return _json_reply({"errors": [], "warnings": []})

    def _preupload(self, request: _Request, repo_id: str, revision: str) -> _Reply:
        files = self._revision_of(self._folder(self._writable(request, repo_id), revision)).files
        answers: list[dict[str, object]] = []
        for wanted in request.json()["files"]:
            name = wanted["path"]
            mode = "lfs" if _is_lfs(name, wanted["size"]) else "regular"
            answers.append({"path": name, "uploadMode": mode, "shouldIgnore": False})
            if name in files:
                answers[-1]["oid"] = files[name].etag
        return _json_reply({"files": answers})

    def _lfs_batch(self, request: _Request, repo_id: str) -> _Reply:
        self._writable(request, repo_id)
        answers: list[dict[str, object]] = []
        for wanted in request.json()["objects"]:
            answers.append({"oid": wanted["oid"], "size": wanted["size"]})
            if not (self._objects / wanted["oid"]).is_file():
                upload = {"href": f"{self._storage_url}/upload/{wanted['oid']}"}
                answers[-1]["actions"] = {
                    "upload": upload,
                    "verify": {"href": f"{self.url}/{repo_id}.git/info/lfs/verify"},
                }
        return _json_reply({"transfer": "basic", "objects": answers})

    def _lfs_verify(self, request: _Request, repo_id: str) -> _Reply:
        self._writable(request, repo_id)
        wanted = request.json()
        stored = self._objects / wanted["oid"]
        if not stored.is_file() or stored.stat().st_size != wanted["size"]:
            raise _RefusedError(404, None, f"object {wanted['oid']} was not uploaded")
        return _json_reply({})

    def _commit(self, request: _Request, repo_id: str, revision: str) -> _Reply:
        folder = self._folder(self._writable(request, repo_id), revision)
        operations = [json.loads(line) for line in request.body.splitlines() if line.strip()]
        with self._writing:
            parent = operations[0]["value"].get("parentCommit")
            if parent not in (None, self._revision_of(folder).commit):
                raise _RefusedError(412, None, "A commit has happened since. Please refresh and try again.")
            # Two passes: a commit with one bad operation changes nothing.
            changes = [self._change(folder, operation) for operation in operations[1:]]
            for change in changes:
                change()
            commit = self._revision_of(folder).commit
        url = f"{self.url}/{repo_id}/commit/{commit}"
        return _json_reply({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def _change(self, folder: Path, operation: Mapping[str, Any]) -> Callable[[], object]:
        """Check one operation of a commit and return what carries it out."""
        kind, value = operation["key"], operation["value"]
        name = PurePosixPath(value["path"])
        if name.is_absolute() or ".." in name.parts or not name.parts:
            raise _RefusedError(400, None, f"{name} is not a path inside the repository")
        target = folder / name
        if kind == "file":
            try:
                content = base64.b64decode(value["content"], validate=True)
            except binascii.Error as error:
                raise _RefusedError(400, None, f"{name}: {error}") from error
            return lambda: _store(target, io.BytesIO(content))
        if kind == "lfsFile":
            stored = self._objects / value["oid"]
            if not stored.is_file():
                raise _RefusedError(400, None, f"{name}: object {value['oid']} was not uploaded")
            return lambda: _store(target, stored.open("rb"))
        if kind in ("deletedFile", "deletedFolder"):
            if not target.exists():
                raise _RefusedError(404, "EntryNotFound", "A file with this name doesn't exist")
            return target.unlink if kind == "deletedFile" else lambda: shutil.rmtree(target)
        raise _RefusedError(400, None, f"unknown operation {kind}")

    # -- The storage host's answers

    def _stored_content(self, request: _Request, repo_id: str, commit: str, filename: str) -> _Reply:
        file = self._revision_of(self._folder(self.repos[repo_id], commit)).files[filename]
        return self._content(request, file, (repo_id, filename), {})

    def _receive_object(self, request: _Request, oid: str) -> _Reply:
        assert request.received is not None
        if (digest := _sha256(request.received)) != oid:
            raise _RefusedError(400, None, f"the content's sha256 is {digest}, not {oid}")
        request.received.replace(self._objects / oid)
        return _Reply(200, headers={"ETag": f'"{oid}"'})

    # -- Transport, for the listeners

    @contextmanager
    def answering(self) -> Iterator[list[HubRequest]]:
        """Hold back readers of the log until what the block appends to the list is in it."""
        with self._idle:
            self._busy += 1
        entries: list[HubRequest] = []
        try:
            yield entries
        finally:
            with self._idle:
                self._log += entries
                self._busy -= 1
                self._idle.notify_all()

    def answer(self, request: _Request, *, from_storage: bool) -> _Reply:
        """Route a request to the method that answers it.

        Raises:
            _RefusedError: The answer is an error.
        """
        if request.token not in (None, OWNER_TOKEN, OUTSIDER_TOKEN):
            raise _RefusedError(401, None, "Invalid credentials in Authorization header")
        for method, pattern, function in _STORAGE_ROUTES if from_storage else _HUB_ROUTES:
            match = re.fullmatch(pattern, request.path)
            if match and request.method in method.split():
                found = {name: unquote(value) for name, value in match.groupdict().items() if value is not None}
                reply: _Reply = getattr(self, function)(request, **found)
                return reply
        raise _RefusedError(501, None, f"this hub has no {request.method} {request.path}")


_REPO = r"(?P<repo_id>[^/]+(?:/[^/]+)??)"
_REVISION = r"(?P<revision>[^/]+)"
_MODEL = f"/api/models/{_REPO}"
_HUB_ROUTES = (
    ("GET", f"{_MODEL}/revision/{_REVISION}", "_model_info"),
    ("GET", f"{_MODEL}/tree/{_REVISION}(?:/(?P<folder>.+))?", "_tree"),
    ("GET", f"{_MODEL}/refs", "_refs"),
    ("GET", f"{_MODEL}/auth-check", "_auth_check"),
    ("GET", _MODEL, "_model_info"),  # after the longer ones: a repository id may have one part or two
    ("POST", f"{_MODEL}/paths-info/{_REVISION}", "_paths_info"),
    ("POST", f"{_MODEL}/preupload/{_REVISION}", "_preupload"),
    ("POST", f"{_MODEL}/commit/{_REVISION}", "_commit"),
    ("POST", "/api/repos/create", "_create_repo"),
    ("POST", "/api/validate-yaml", "_validate_yaml"),
    ("GET", "/api/whoami-v2", "_whoami"),
    ("GET", "/api/agent-harnesses", "_agent_harnesses"),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "_lfs_batch"),
    ("POST", rf"/{_REPO}\.git/info/lfs/verify", "_lfs_verify"),
    ("GET HEAD", f"/{_REPO}/resolve/{_REVISION}/(?P<filename>.+)", "_resolve"),
)
_STORAGE_ROUTES = (
    ("PUT", "/upload/(?P<oid>[0-9a-f]{64})", "_receive_object"),
    ("GET HEAD", rf"/{_REPO}/(?P<commit>[0-9a-f]{{40}})/(?P<filename>.+)", "_stored_content"),
)


class _Listener(ThreadingHTTPServer):
    """One port on the loopback interface."""

    daemon_threads = True

    def __init__(self, hub: HubServer, *, from_storage: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub
        self.from_storage = from_storage


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    timeout: ClassVar[float | None] = 60

    def _respond(self) -> None:
        listener = self.server
        assert isinstance(listener, _Listener)
        with listener.hub.answering() as log, tempfile.TemporaryDirectory() as scratch:
            request = self._receive(Path(scratch))
            try:
                reply = listener.hub.answer(request, from_storage=listener.from_storage)
            except _RefusedError as refused:
                reply = refused.reply
            except Exception:  # a status that the client neither retries nor takes for an answer of the Hub
                reply = _RefusedError(501, None, traceback.format_exc()).reply
            sent = self._send(reply)
            repo_id, filename = reply.subject or (None, None)
            log.append(
                HubRequest(
                    method=self.command,
                    path=self.path,
                    status=reply.status,
                    range=request.range,
                    body_bytes=sent,
                    repo_id=repo_id,
                    filename=filename,
                    token=request.token,
                    from_storage=listener.from_storage,
                )
            )

    do_GET = do_HEAD = do_POST = do_PUT = _respond  # noqa: N815

    def _receive(self, scratch: Path) -> _Request:
        parts = urlsplit(self.path)
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        received = scratch / "body" if self.command == "PUT" else None
        if received:
            with received.open("wb") as sink:
                sink.writelines(self._body())
        return _Request(
            method=self.command,
            path=parts.path,
            query=parse_qs(parts.query),
            range=self.headers.get("Range"),
            token=token if scheme.lower() == "bearer" else None,
            body=b"" if received else b"".join(self._body()),
            received=received,
        )

    def _body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass  # trailers
            return
        remaining = int(self.headers.get("Content-Length", 0))
        while remaining:
            chunk = self.rfile.read(min(remaining, _CHUNK))
            if not chunk:
                raise ConnectionError("the client closed the connection amid a request")
            remaining -= len(chunk)
            yield chunk

    def _send(self, reply: _Reply) -> int:
        """Send the answer and return how many bytes of its body were written."""
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        length = len(reply.body) if reply.file is None else reply.stop - reply.start
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "HEAD":
            return 0
        sent = 0
        with io.BytesIO(reply.body) if reply.file is None else reply.file.open("rb") as content:
            content.seek(reply.start)
            try:
                while chunk := content.read(min(_CHUNK, length - sent)):
                    self.wfile.write(chunk)
                    sent += len(chunk)
            except ConnectionError:
                pass  # the client has what it wanted
        self.close_connection = self.close_connection or sent < length
        return sent

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the server keeps its own log."""
