"""Carry out a plan: stream every shard into a staging folder; the destination appears by one rename."""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import Any, TypedDict, Unpack

from gqaconvert import __version__
from gqaconvert.card import model_card, source_card
from gqaconvert.checkpoint import hub
from gqaconvert.checkpoint.dtypes import SAFETENSORS_NAMES
from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.source import fetch_source, open_source
from gqaconvert.checkpoint.staging import Staging
from gqaconvert.checkpoint.writer import Advance, hash_file
from gqaconvert.destination import check_destination, free_bytes, json_bytes, located, refuse_overlap, storage_errors
from gqaconvert.errors import CheckpointError, DestinationError, GqaConvertError, InputError, StorageError
from gqaconvert.inspection import read_checkpoint, read_provenance
from gqaconvert.merge import SITE_METHODS, check_method
from gqaconvert.planning import (
    CalibrationText,
    ConversionPlan,
    Recipe,
    cache_bytes_per_token,
    fingerprint,
    index_document,
    plan_conversion,
    recipe_document,
)
from gqaconvert.shard_writing import write_shards
from gqaconvert.sidecars import CARD, CONFIG, PROVENANCE, output_name
from gqaconvert.texts import EXAMPLE, sha256_of
from gqaconvert.units import format_size

SCHEMA = "gqaconvert.convert/1"
PROVENANCE_SCHEMA = "gqaconvert.provenance/1"
DEFAULT_CALIBRATION_TOKENS = 40_000


@dataclass(frozen=True)
class ConversionResult:
    """A finished conversion.

    Attributes:
        destination: the folder.
        plan: what was done.
        shards: name -> sha256.
        resumed: shards that an interrupted run had finished.
        sites: facts of the attention sites that a site method merged, as in a report.
        commit_url: of the upload, if one was asked for.
    """

    destination: Path
    plan: ConversionPlan
    shards: Mapping[str, str]
    resumed: tuple[str, ...]
    sites: tuple[Mapping[str, Any], ...] = ()
    commit_url: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            **plan_document(self.plan, self.destination),
            "dry_run": False,
            "shards": [
                {"name": shard.name, "nbytes": shard.nbytes, "sha256": self.shards[shard.name]}
                for shard in self.plan.shards
            ],
            "resumed_shards": list(self.resumed),
            "sites": [dict(site) for site in self.sites],
            "commit_url": self.commit_url,
        }


def plan_document(plan: ConversionPlan, destination: str | Path) -> dict[str, Any]:
    """A plan as JSON: everything that would be done."""
    source, target = plan.source_geometry, plan.target_geometry
    return {
        "schema": SCHEMA,
        "dry_run": True,
        "source": plan.checkpoint.files.label,
        "revision": plan.checkpoint.files.revision,
        "destination": str(destination),
        "family": plan.family.name,
        "form": plan.form_name,
        "recipe": recipe_document(plan.recipe),
        "num_attention_heads": source.num_attention_heads,
        "num_key_value_heads": {"source": source.num_key_value_heads, "target": target.num_key_value_heads},
        "cache_bytes_per_token": cache_bytes_per_token(plan),
        "source_bytes": plan.checkpoint.index.total_size,
        "total_size": plan.total_size,
        "output_bytes": plan.output_bytes,
        "work_bytes": plan.work_bytes,
        "free_bytes": free_bytes(located(destination)),
        "config_changes": dict(plan.config_changes),
        "shards": [{"name": shard.name, "nbytes": shard.nbytes} for shard in plan.shards],
        "changed_tensors": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "source_shape": list(tensor.source.shape),
                "shape": list(tensor.shape),
            }
            for tensor in plan.changed
        ],
        "unchanged_tensors": sum(len(shard.tensors) for shard in plan.shards) - len(plan.changed),
        "files": [output_name(name) for name in plan.sidecars.names],
        "code": list(plan.code),
        "left_out": dict(plan.sidecars.left_out),
    }


class RecipeOptions(TypedDict, total=False):
    """What may be said about an output besides its number of KV heads.

    Attributes:
        method: pooling method, "mean" by default, or site method.
        seed: for methods that draw, and for the order of calibration text.
        dtype: torch name of the output's floating type; by default each tensor keeps its own.
        max_shard_size: bytes; by default the source's sharding.
        family: layout that the user vouches for.
        grouping: "adjacent", or "similar": heads are reordered so that those that merge well become neighbours.
        calibrate: text file to fit site methods on, or "example".
        calibration_tokens: at most so many tokens of it.
        refine: steps a layer of fitting after the merge, or "auto".
        joint: steps on all layers together after that.
        expanded: write the merged heads repeated, for a class that has no setting for fewer; it saves nothing.
    """

    method: str
    seed: int
    dtype: str | None
    max_shard_size: int | None
    family: str | None
    grouping: str
    calibrate: str | None
    calibration_tokens: int
    refine: int | str | None
    joint: int | None
    expanded: bool


def make_recipe(kv_heads: int, **options: Unpack[RecipeOptions]) -> Recipe:
    """A recipe from the words of the command line.

    Raises:
        InputError: an unknown type or method, or options that do not belong together.
    """
    method, dtype = options.get("method", "mean"), options.get("dtype")
    grouping, calibrate = options.get("grouping", "adjacent"), options.get("calibrate")
    refine, joint = options.get("refine"), options.get("joint")
    if dtype is not None and dtype not in SAFETENSORS_NAMES:
        raise InputError(f"no dtype {dtype!r}", hint=f"known: {', '.join(SAFETENSORS_NAMES)}")
    check_method(method)
    if method not in SITE_METHODS and (grouping != "adjacent" or calibrate or refine or joint):
        raise InputError(
            f"--grouping, --calibrate, --refine and --joint need a method that merges whole layers, not {method}",
            hint=f"--method {next(iter(SITE_METHODS))}",
        )
    if grouping not in ("adjacent", "similar"):
        raise InputError(f"no grouping {grouping!r}", hint="known: adjacent, similar")
    if refine is not None and refine != "auto" and (not isinstance(refine, int) or refine < 0):
        raise InputError(f"--refine {refine}: give a number of steps, or auto")
    if joint is not None and joint < 0:
        raise InputError(f"--joint {joint}: give a number of steps")
    if (refine or joint) and calibrate is None:
        calibrate = EXAMPLE
    if calibrate and options.get("expanded"):
        raise InputError("--expanded does not go with --calibrate, --refine and --joint: they fit G heads, not copies")
    tokens = options.get("calibration_tokens", DEFAULT_CALIBRATION_TOKENS)
    return Recipe(
        num_key_value_heads=kv_heads,
        method=method,
        seed=options.get("seed", 0),
        dtype=SAFETENSORS_NAMES[dtype] if dtype else None,
        max_shard_size=options.get("max_shard_size"),
        family=options.get("family"),
        grouping=grouping,
        calibration=CalibrationText(calibrate, sha256_of(calibrate), tokens) if calibrate else None,
        refine=refine,
        joint=joint or None,
        expanded=options.get("expanded", False),
    )


def convert_plan(
    source: str, recipe: Recipe, *, revision: str | None = None, offline: bool = False, fetch: bool = False
) -> ConversionPlan:
    """What a conversion would do; for a Hub id only headers travel, unless ``fetch``.

    Raises:
        GqaConvertError: whatever forbids the conversion.
    """
    opener = fetch_source if fetch else open_source
    return plan_conversion(
        read_checkpoint(opener(source, revision=revision, offline=offline), family=recipe.family), recipe
    )


def convert(
    source: str,
    destination: str | Path,
    kv_heads: int,
    *,
    revision: str | None = None,
    offline: bool = False,
    resume: bool = False,
    restart: bool = False,
    overwrite: bool = False,
    push_to_hub: str | None = None,
    on_plan: Callable[[ConversionPlan], None] = lambda plan: None,
    on_progress: Advance = lambda nbytes: None,
    on_site: Callable[[Mapping[str, Any]], None] = lambda facts: None,
    on_step: Callable[[int, int, float], None] = lambda step, steps, loss: None,
    **options: Unpack[RecipeOptions],
) -> ConversionResult:
    """Write a checkpoint with ``kv_heads`` KV heads.

    Args:
        source: folder or Hub id.
        destination: folder to create.
        kv_heads: KV heads of the output.
        revision: branch, tag or commit of a Hub id.
        offline: use only what is in the Hub client's cache.
        resume: continue an interrupted run.
        restart: discard an interrupted run.
        overwrite: replace a destination that is not empty, once the new one is whole.
        push_to_hub: repository to upload the finished folder to.
        on_plan: called once, before anything is written.
        on_progress: called with the number of bytes that were just written.
        on_site: called with the facts of each attention site that a site method merged.
        on_step: called with each joint step's number, their count, and the mean divergence in nats.
        options: what decides the output's bytes, see `RecipeOptions`.

    Raises:
        GqaConvertError: nothing was written to the destination.
    """
    destination = located(destination)
    if push_to_hub is not None and not hub.REPO_ID.fullmatch(push_to_hub):
        raise InputError(f"--push-to-hub {push_to_hub}: not a repository id", hint="for example: your-name/your-model")
    recipe = make_recipe(kv_heads, **options)
    check_destination(destination, overwrite=overwrite or resume)
    plan = convert_plan(source, recipe, revision=revision, offline=offline, fetch=True)
    folder = plan.checkpoint.files
    assert isinstance(folder, LocalFolder)
    refuse_overlap(folder, plan.checkpoint.index, destination)
    on_plan(plan)
    done = _finished_earlier(plan, destination) if resume and not overwrite else None
    if done is None:
        check_destination(destination, overwrite=overwrite)
        with storage_errors(destination, "what was finished is kept; after mending the cause, --resume continues"):
            done = _execute(
                plan,
                folder,
                destination,
                resume=resume,
                restart=restart,
                advance=on_progress,
                on_site=on_site,
                on_step=on_step,
            )
    if push_to_hub is None:
        return done
    return replace(done, commit_url=hub.upload(destination, push_to_hub))


def _finished_earlier(plan: ConversionPlan, destination: Path) -> ConversionResult | None:
    """The result of the same conversion, if an earlier run completed it and was killed only afterwards."""
    try:
        record = json.loads((destination / PROVENANCE).read_text())
        shards = {name: shard["sha256"] for name, shard in record["shards"].items()}
        same = record == provenance(plan, shards)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    if not same or any(hash_file(destination / name) != digest for name, digest in shards.items()):
        return None
    return ConversionResult(destination, plan, shards, tuple(shards))


def _execute(
    plan: ConversionPlan,
    folder: LocalFolder,
    destination: Path,
    *,
    resume: bool,
    restart: bool,
    advance: Advance,
    on_site: Callable[[Mapping[str, Any]], None],
    on_step: Callable[[int, int, float], None],
) -> ConversionResult:
    digest = fingerprint(plan, folder)
    # torch takes seconds to import; the first bytes are copied meanwhile.
    Thread(target=import_module, args=("gqaconvert.merge.execute",), daemon=True).start()
    with Staging(destination) as staging:
        if staging.interrupted and not (resume or restart):
            raise DestinationError(
                f"an interrupted run to {destination} was found",
                hint="--resume continues it, --restart discards it",
            )
        try:
            trusted = staging.begin(digest, resume=resume)
            shards = {
                shard.name: trusted[f"model/{shard.name}"] for shard in plan.shards if f"model/{shard.name}" in trusted
            }
            resumed = tuple(shards)
            _require_space(plan, destination, resumed)
            if plan.work and len(shards) < len(plan.shards):
                from gqaconvert.site_merging import merge_sites

                merge_sites(plan, folder, staging, frozenset(trusted), advance, on_site, on_step)
            sites = _site_facts(plan, staging)
            write_shards(plan, folder, staging, shards, advance)
            if fingerprint(plan, folder) != digest:
                raise CheckpointError(f"{folder.root} changed while it was converted", hint="convert it again")
            shards = {shard.name: shards[shard.name] for shard in plan.shards}
            _write_rest(plan, folder, staging, shards)
            _reopen(plan, staging)
        except GqaConvertError as error:
            # Bad input cannot be resumed; a full disk or a Ctrl-C can.
            if not isinstance(error, (StorageError, DestinationError)) or not staging.has_results:
                staging.discard()
            raise
        staging.commit()
    return ConversionResult(destination, plan, shards, resumed, sites)


def _site_facts(plan: ConversionPlan, staging: Staging) -> tuple[Mapping[str, Any], ...]:
    if not plan.work:
        return ()
    from gqaconvert.site_merging import load_facts

    return tuple(load_facts(staging.folder, work) for work in plan.work)


def _require_space(plan: ConversionPlan, destination: Path, finished: tuple[str, ...]) -> None:
    needed = plan.output_bytes + plan.work_bytes
    needed -= sum(shard.nbytes for shard in plan.shards if shard.name in finished)
    free = free_bytes(destination)
    if needed > free:
        raise StorageError(
            f"{destination} needs {format_size(needed)}, {format_size(free)} are free there",
            hint="free some space, or choose another place",
        )


def _write_rest(plan: ConversionPlan, folder: LocalFolder, staging: Staging, shards: Mapping[str, str]) -> None:
    """Everything but the shards; config.json and the index come last, so that nothing looks complete before."""
    for name in plan.sidecars.names:
        target = staging.model / output_name(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        with folder.path(name).open("rb") as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)
    (staging.model / CARD).write_bytes(model_card(plan, source_card(folder)).encode(errors="replace"))
    for name, text in plan.code.items():
        (staging.model / name).write_bytes(text.encode())
    (staging.model / PROVENANCE).write_bytes(json_bytes(provenance(plan, shards)))
    if plan.index_file:
        (staging.model / plan.index_file).write_bytes(json_bytes(index_document(plan)))
    (staging.model / CONFIG).write_bytes(json_bytes(plan.config))


def provenance(plan: ConversionPlan, shards: Mapping[str, str]) -> dict[str, Any]:
    """gqaconvert.json: where the output comes from. Holds no time, so equal runs give equal bytes."""
    checkpoint, source, target = plan.checkpoint, plan.source_geometry, plan.target_geometry
    return {
        "schema": PROVENANCE_SCHEMA,
        "tool": {"name": "gqaconvert", "version": __version__},
        "source": {
            "id": checkpoint.files.label,
            "revision": checkpoint.files.revision,
            "model_type": checkpoint.config.model_type,
            "family": plan.family.name,
            "num_attention_heads": source.num_attention_heads,
            "num_key_value_heads": source.num_key_value_heads,
            "head_dim": source.head_dim,
            "total_size": checkpoint.index.total_size,
            "provenance": read_provenance(checkpoint.files),
        },
        "recipe": recipe_document(plan.recipe),
        "result": {
            "num_key_value_heads": target.num_key_value_heads,
            "total_size": plan.total_size,
            "cache_bytes_per_token": cache_bytes_per_token(plan)["target"],
        },
        "shards": {shard.name: {"sha256": shards[shard.name], "nbytes": shard.nbytes} for shard in plan.shards},
    }


def _reopen(plan: ConversionPlan, staging: Staging) -> None:
    """Open every written shard with the safetensors library itself, before anything gets a final name."""
    from safetensors import SafetensorError, safe_open

    for shard in plan.shards:
        try:
            with safe_open(staging.model / shard.name, framework="pt") as file:
                names = set(file.keys())
        except SafetensorError as error:
            raise CheckpointError(f"the safetensors library refuses {shard.name}: {error}") from error
        assert names == {tensor.name for tensor in shard.tensors}, shard.name
    assert sys.byteorder == "little", "safetensors files are little-endian"
