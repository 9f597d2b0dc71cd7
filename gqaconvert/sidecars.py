"""The files beside the weights: all are carried over, but for those that would contradict or double the new weights."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.index import CheckpointIndex
from gqaconvert.errors import CheckpointError
from gqaconvert.families.shipped import FILE

CONFIG, PROVENANCE, CARD, SOURCE_CARD = "config.json", "gqaconvert.json", "README.md", "README.source.md"
GENERATED = frozenset((CONFIG, PROVENANCE, CARD, FILE))
"""Files that a conversion writes itself."""

# A deny-list: an allow-list would one day miss a processor's or a template's file. What is denied is either weights
# (in any format) or the state of a training run that these weights no longer belong to.
_LEFT_OUT: tuple[tuple[str, str], ...] = (
    (r"(.*/)?[^/]*\.safetensors(\.index\.json)?", "weights that are not part of the checkpoint"),
    (
        r"(.*/)?[^/]*\.(gguf|onnx|onnx_data|h5|msgpack|tflite|ot|npz|ckpt|distcp|mlmodel|engine)",
        "weights in another format",
    ),
    (
        r"(.*/)?(optimizer|scheduler|rng_state.*|training_args|scaler|random_states.*)\.(pt|pth|bin|pkl)",
        "training state",
    ),
    (r"(.*/)?trainer_state\.json", "training state"),
    (r"(.*/)?[^/]*\.(bin|pt|pth|pkl|pickle)(\.index\.json)?", "pickled data"),
    (r"original/.*", "a second copy of the model in Meta's layout"),
    (
        r"adapter_config\.json",
        "an adapter's config beside full weights: loaders would take the folder for an adapter",
    ),
)


@dataclass(frozen=True)
class Sidecars:
    """Files to copy, and files that are not, with the reason. ``nbytes`` of those to copy."""

    names: tuple[str, ...]
    nbytes: int
    left_out: Mapping[str, str]


def plan_sidecars(index: CheckpointIndex) -> Sidecars:
    """Sort the files beside the shards.

    Raises:
        CheckpointError: a file is a link out of the folder: a conversion copies contents, and should not copy secrets.
    """
    used = {shard.shard for shard in index.shards} | GENERATED - {CARD} | {index.index_file}
    names: list[str] = []
    left_out: dict[str, str] = {}
    for name in index.files.sizes:
        if name in used:
            continue
        reason = next((reason for pattern, reason in _LEFT_OUT if re.fullmatch(pattern, name)), None)
        if reason:
            left_out[name] = reason
        elif not (name == CARD and SOURCE_CARD in index.files.sizes):
            names.append(name)
    if isinstance(index.files, LocalFolder):
        for name in names:
            _refuse_outside_link(index.files, name)
    return Sidecars(tuple(names), sum(index.files.sizes[name] for name in names), left_out)


def output_name(name: str) -> str:
    """Name of a carried file in the output: the source's card makes room for the new one."""
    return SOURCE_CARD if name == CARD else name


def _refuse_outside_link(folder: LocalFolder, name: str) -> None:
    root = folder.root.resolve()
    target = folder.path(name).resolve()
    # A snapshot of the Hub's cache links to ../../blobs.
    allowed = (root, root.parent.parent / "blobs") if root.parent.name == "snapshots" else (root,)
    if not any(target.is_relative_to(place) for place in allowed):
        raise CheckpointError(
            f"{folder.path(name)} is a link to {target}, outside the checkpoint",
            hint="replace the link by the file if it belongs to the model, or delete it",
        )
