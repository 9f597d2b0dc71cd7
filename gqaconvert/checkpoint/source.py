"""From what the user typed to files that can be read, or to a clear word about what was found instead."""

import re
from collections.abc import Iterable
from pathlib import Path

from gqaconvert.checkpoint import headers, hub
from gqaconvert.checkpoint.files import CheckpointFiles, LocalFolder
from gqaconvert.errors import InputError, SourceNotFoundError, UnsupportedFormatError

_OTHER_FORMATS: tuple[tuple[str, str, str], ...] = (
    (r"(.*/)?zero_pp_rank_.*|(.*/)?.*_optim_states\.pt|zero_to_fp32\.py", "DeepSpeed ZeRO shards",
     "gather them first: python zero_to_fp32.py . OUT --safe_serialization"),
    (r"(.*/)?.*\.distcp|(.*/)?pytorch_model_fsdp.*", "a torch.distributed (FSDP) checkpoint",
     "gather it first, e.g. 'accelerate merge-weights DIR OUT'"),
    (r"(.*/)?consolidated\.\d+\.pth", "Meta's own layout (consolidated.*.pth)",
     "take the Hugging Face version of the model, or convert it with transformers' convert_llama_weights_to_hf.py"),
    (r".*\.gguf", "GGUF files", headers.GGUF_HINT),
    (r".*\.(bin|pt|pth|ckpt)", "pickled PyTorch weights", headers.PICKLE_HINT),
    (r".*\.(h5|msgpack|onnx|tflite|npz)", "weights for another framework", headers.PICKLE_HINT),
)  # fmt: skip


def open_source(source: str, *, revision: str | None = None, offline: bool = False) -> CheckpointFiles:
    """Open a checkpoint for reading headers and JSON: a local folder, or a Hub id of which only headers travel.

    Raises:
        SourceNotFoundError: nothing there.
        UnsupportedFormatError: something there, but no safetensors checkpoint.
        HubError: the Hub cannot be reached, or does not let us in.
    """
    local = _local(source, revision)
    if local is not None:
        return local
    if offline or hub.is_offline():
        return fetch_source(source, revision=revision, offline=True)
    repo = hub.HubRepo.open(source, revision=revision)
    refuse_other_formats(repo.sizes, label=repo.label)
    return repo


def fetch_source(source: str, *, revision: str | None = None, offline: bool = False) -> LocalFolder:
    """Open a checkpoint for reading its weights: a Hub id is downloaded into the client's cache first.

    Raises:
        the same as `open_source`.
    """
    local = _local(source, revision)
    if local is not None:
        return local
    offline = offline or hub.is_offline()
    if not offline:  # before anything large travels
        refuse_other_formats(hub.HubRepo.open(source, revision=revision).sizes, label=source)
    folder = hub.download(source, revision=revision, offline=offline)
    refuse_other_formats(folder.sizes, label=source)
    return folder


def _local(source: str, revision: str | None) -> LocalFolder | None:
    if not source:
        raise SourceNotFoundError("the source is empty", hint="give a folder or a Hub id")
    path = Path(source).expanduser()
    try:
        found = path.exists()
    except (OSError, ValueError):  # a name too long, or with a NUL
        found = False
    if not found:
        looks_local = source.startswith((".", "/", "~")) or source.count("/") > 1 or not hub.REPO_ID.fullmatch(source)
        if looks_local or (path.parent != Path() and path.parent.is_dir()):
            raise SourceNotFoundError(f"no such folder: {source}")
        return None
    if revision is not None:
        raise InputError(f"--revision belongs to a Hub id, and {source} is a local path")
    if not path.is_dir():
        _refuse_file(path)
    folder = LocalFolder.open(path)
    refuse_other_formats(folder.sizes, label=source)
    return folder


def _refuse_file(path: Path) -> None:
    for pattern, what, hint in _OTHER_FORMATS:
        if re.fullmatch(pattern, path.name):
            raise UnsupportedFormatError(f"{path} is one of: {what}", hint=hint)
    raise InputError(f"{path} is a file", hint="give the folder that holds config.json and the safetensors files")


def refuse_other_formats(names: Iterable[str], *, label: str) -> None:
    """Name what is there instead of full safetensors weights.

    Raises:
        UnsupportedFormatError: pickles, GGUF, adapters, distributed shards ... and no safetensors weights.
    """
    names = set(names)
    weights = {name for name in names if name.endswith(".safetensors") and "/" not in name}
    if weights - {"adapter_model.safetensors"} or any(name.endswith(".safetensors.index.json") for name in names):
        return
    if "adapter_config.json" in names:
        raise UnsupportedFormatError(
            f"{label} is an adapter (LoRA or similar), not a model",
            hint="merge it into its base first: peft's merge_and_unload(), then save_pretrained(DIR)",
        )
    for pattern, what, hint in _OTHER_FORMATS:
        if any(re.fullmatch(pattern, name) for name in names):
            raise UnsupportedFormatError(f"{label} holds {what}, and no safetensors weights", hint=hint)
    raise UnsupportedFormatError(
        f"{label} holds no safetensors weights",
        hint="give the folder that holds config.json and *.safetensors",
    )
