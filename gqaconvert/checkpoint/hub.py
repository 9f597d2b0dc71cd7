"""The Hub: read a repository's headers by range requests, fetch it, upload to it. Never used for a local path."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gqaconvert.checkpoint import headers
from gqaconvert.checkpoint.files import LocalFolder, refuse_large
from gqaconvert.checkpoint.headers import ShardHeader
from gqaconvert.errors import GqaConvertError, HubError, SourceNotFoundError

_FIRST_REQUEST = 100_000
"""Bytes of the first range request: enough for most headers, so one request a shard."""

REPO_ID = re.compile(r"[\w][\w.\-]*(/[\w][\w.\-]*)?", re.ASCII)

IGNORED_DOWNLOADS = (
    "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.onnx_data", "*.ot", "*.tflite",
    "original/*",
)  # fmt: skip


@contextmanager
def _hub_errors(repo_id: str, revision: str | None) -> Iterator[None]:
    """Turn the client's exceptions into ours: what is missing, and what the user can do."""
    from huggingface_hub import errors

    # The client's transport errors share this base; the package they come from changes with the client's version.
    transport_error: type[BaseException] = errors.HfHubHTTPError.__bases__[0]
    try:
        yield
    except errors.GatedRepoError as error:
        raise HubError(
            f"{repo_id} is gated: its owner has to grant access",
            hint=f"accept the conditions at https://huggingface.co/{repo_id}, then 'hf auth login'",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise SourceNotFoundError(
            f"{repo_id} is neither a local folder nor a repository that you can see",
            hint="check the spelling; for a private repository run 'hf auth login' first",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SourceNotFoundError(f"{repo_id} has no revision {revision!r}") from error
    except errors.LocalEntryNotFoundError as error:
        raise HubError(
            f"{repo_id} is not (completely) in the local cache",
            hint="run once with a network and without --offline",
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise HubError(
            f"{repo_id} is on the Hub, and HF_HUB_OFFLINE is set", hint="unset it, or give a folder"
        ) from error
    except errors.EntryNotFoundError as error:
        raise SourceNotFoundError(f"{repo_id}: {_first_line(error)}") from error
    except errors.HFValidationError as error:
        raise SourceNotFoundError(f"{repo_id!r} is neither a folder nor a repository id") from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise HubError(
                f"the Hub refuses access to {repo_id} ({status}): {_first_line(error)}",
                hint="'hf auth login' with a token that has the rights",
            ) from error
        raise HubError(f"the Hub fails for {repo_id}: {_first_line(error)}", hint="try again later") from error
    except (transport_error, ConnectionError, TimeoutError) as error:
        raise HubError(
            f"the Hub cannot be reached for {repo_id}: {type(error).__name__}: {_first_line(error)}",
            hint="check the network; with a cached copy, --offline works without it",
        ) from error


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")[:200]


def is_offline() -> bool:
    """Whether the client's own switch, HF_HUB_OFFLINE, is on."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


@dataclass(frozen=True)
class HubRepo:
    """One commit of a repository. Only small files and headers are transferred."""

    label: str
    revision: str | None
    sizes: Mapping[str, int]

    @classmethod
    def open(cls, repo_id: str, *, revision: str | None) -> "HubRepo":
        """Ask for the list of files.

        Raises:
            SourceNotFoundError: no such repository or revision.
            HubError: gated, or no network.
        """
        with _hub_errors(repo_id, revision):
            from huggingface_hub import HfApi

            info = HfApi().model_info(repo_id, revision=revision, files_metadata=True)
        sizes = {entry.rfilename: entry.size or 0 for entry in info.siblings or ()}
        return cls(repo_id, info.sha or revision, sizes)

    def read_bytes(self, name: str) -> bytes:
        """A small file, through the client's cache."""
        refuse_large(name, self.sizes[name])
        with _hub_errors(self.label, self.revision):
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(self.label, name, revision=self.revision)).read_bytes()

    def read_header(self, name: str) -> ShardHeader:
        """The checked header of one safetensors file; one range request, a second one if the header is long."""
        start = self._range(name, 0, _FIRST_REQUEST)
        length = headers.header_length(start[: headers.LENGTH_BYTES], shard=name)
        raw = start[headers.LENGTH_BYTES :]
        if len(raw) < length:
            raw = self._range(name, headers.LENGTH_BYTES, length)
        return headers.parse_header(raw[:length], shard=name, file_size=self.sizes[name] or None)

    def _range(self, name: str, start: int, count: int) -> bytes:
        with _hub_errors(self.label, self.revision):
            from huggingface_hub import get_session, hf_hub_url
            from huggingface_hub.utils import build_hf_headers, hf_raise_for_status  # type: ignore[attr-defined]

            response = get_session().get(
                hf_hub_url(self.label, name, revision=self.revision),
                headers={**build_hf_headers(), "range": f"bytes={start}-{start + count - 1}"},
                follow_redirects=True,
                timeout=30,
            )
            hf_raise_for_status(response)
            return bytes(response.content)


def download(repo_id: str, *, revision: str | None, offline: bool) -> LocalFolder:
    """Fetch a repository into the client's cache (resumable) and open the snapshot.

    Raises:
        SourceNotFoundError: no such repository or revision.
        HubError: gated, no network, or not cached while offline.
    """
    with _hub_errors(repo_id, revision):
        from huggingface_hub import snapshot_download

        path = snapshot_download(
            repo_id, revision=revision, local_files_only=offline, ignore_patterns=list(IGNORED_DOWNLOADS)
        )
    folder = LocalFolder.open(Path(path), label=repo_id, repo_id=repo_id)
    if offline and not _is_whole(folder):
        raise HubError(
            f"{repo_id} is not completely in the local cache", hint="run once with a network and without --offline"
        )
    return folder


def _is_whole(folder: LocalFolder) -> bool:
    """Whether config.json and all weights are there: a download may have been interrupted, or was never for weights."""
    for name in folder.sizes:
        if name.endswith(".safetensors.index.json") and "/" not in name:
            with suppress(ValueError, AttributeError, TypeError):  # what is wrong with an index is said elsewhere
                if not set(json.loads(folder.read_bytes(name))["weight_map"].values()) <= folder.sizes.keys():
                    return False
    return "config.json" in folder.sizes and any(name.endswith(".safetensors") for name in folder.sizes)


def upload(folder: Path, repo_id: str) -> str:
    """Create the repository if needed and upload the folder as one commit. Returns the commit's address.

    Raises:
        HubError: not logged in, no right to write, or no network; the folder is complete all the same.
    """
    try:
        with _hub_errors(repo_id, None):
            from huggingface_hub import HfApi

            api = HfApi()
            api.create_repo(repo_id, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                commit_message="Upload a checkpoint converted by gqaconvert",
            )
    except GqaConvertError as error:
        raise HubError(
            f"{folder} is complete, but was not uploaded: {error.message}",
            hint=f"after 'hf auth login' with the right to write there: hf upload {repo_id} {folder} .",
        ) from error
    return str(commit.commit_url)
