"""Merge whole attention sites into work files, one after the other: from weights alone, or on calibration text."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.headers import TensorEntry
from gqaconvert.checkpoint.staging import Staging
from gqaconvert.checkpoint.writer import Advance, hash_file
from gqaconvert.errors import CheckpointError
from gqaconvert.families.sites import rewritten
from gqaconvert.merge.execute import torch_dtype
from gqaconvert.merge.grouping import group_by_mergeability
from gqaconvert.merge.groups import MergeResult
from gqaconvert.merge.heads import AttentionHeads, permute_heads
from gqaconvert.merge.rounding import round_once
from gqaconvert.merge.sites import load_heads, site_merge, store_heads
from gqaconvert.planning import ByteRange, ConversionPlan, SiteWork
from gqaconvert.reading import SourceReader

OnSite = Callable[[Mapping[str, Any]], None]
"""Called with the facts of each site that was merged."""
OnStep = Callable[[int, int, float], None]
"""Called with the number of each joint step, of how many, and its mean divergence in nats."""


def merge_sites(
    plan: ConversionPlan,
    folder: LocalFolder,
    staging: Staging,
    trusted: frozenset[str],
    advance: Advance,
    on_site: OnSite,
    on_step: OnStep,
) -> None:
    """Write the work file of every site that is not among the ``trusted`` ones of an interrupted run.

    Raises:
        CheckpointError: weights that are not finite.
        GqaConvertError: whatever calibration raises.
    """
    with SourceReader(folder, staging.folder) as sources:
        if plan.recipe.calibration is not None:
            from gqaconvert.calibration import merge_calibrated
            from gqaconvert.joint_refinement import refine_sites_jointly, require_memory_for

            if plan.recipe.joint:
                require_memory_for(plan)
            merge_calibrated(plan, folder, staging, sources, trusted, advance, on_site)
            if plan.recipe.joint:
                refine_sites_jointly(plan, folder, staging, sources, trusted, advance, on_step)
            return
        for work in plan.work:
            if work.shard not in trusted:
                heads = read_heads(plan, work, sources)
                result = merge_heads(plan, work, heads, None)
                facts = diagnostics(work, heads, result)
                save_work(staging, work, rounded(plan, work, result.heads), facts)
            advance(work.nbytes)
            on_site(load_facts(staging.folder, work))


def read_tensors(work: SiteWork, sources: SourceReader) -> dict[str, Tensor]:
    """The site's tensors as they are stored in the source."""
    return {entry.name: read_tensor(entry, sources) for _, _, entry in rewritten(work.site)}


def read_tensor(entry: TensorEntry, sources: SourceReader) -> Tensor:
    """One tensor as it is stored in the source."""
    data = sources.read(ByteRange(entry.shard, entry.start, entry.nbytes))
    return torch.frombuffer(data, dtype=torch_dtype(entry.dtype)).view(entry.shape)


def read_heads(plan: ConversionPlan, work: SiteWork, sources: SourceReader) -> AttentionHeads:
    """The site's heads in float64.

    Raises:
        CheckpointError: they are not finite.
    """
    tensors = read_tensors(work, sources)
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(
                f"{name} has NaN or infinite values", hint="'gqaconvert inspect --check' lists all such tensors"
            )
    return load_heads({name: t.to(torch.float64) for name, t in tensors.items()}, work.site, plan.layouts[0])


def merge_heads(plan: ConversionPlan, work: SiteWork, heads: AttentionHeads, moment: Tensor | None) -> MergeResult:
    """Apply the recipe's grouping and method to a site."""
    count, rotary = plan.target_geometry.num_key_value_heads, work.freedom.rotary
    if plan.recipe.grouping == "similar":
        heads = permute_heads(heads, group_by_mergeability(heads, count, rotary=rotary, moment=moment))
    return site_merge(plan.recipe.method)(heads, count, rotary, moment)


def rounded(plan: ConversionPlan, work: SiteWork, heads: AttentionHeads) -> dict[str, Tensor]:
    """The site's output tensors in the types that they are stored in.

    Raises:
        CheckpointError: a value does not fit its type.
    """
    return rounded_tensors(work, store_heads(heads, work.site, plan.layouts[1], plan.target_geometry))


def rounded_tensors(work: SiteWork, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same for tensors by name."""
    return {name: _in_type(name, tensors[name], dtype) for name, dtype, _ in work.tensors}


def _in_type(name: str, values: Tensor, dtype: str) -> Tensor:
    stored = round_once(values.to(torch.float64), torch_dtype(dtype))
    if not torch.isfinite(stored).all():
        raise CheckpointError(f"{name}: the merged values do not fit {dtype}", hint="choose another --dtype")
    return stored


def diagnostics(work: SiteWork, source: AttentionHeads, result: MergeResult) -> dict[str, Any]:
    """What a report tells of a site."""
    return {
        "layer": work.site.layer,
        "key_explained": result.key_explained.tolist(),
        "value_explained": result.value_explained.tolist(),
        "source_key_rms": float(source.key.square().mean().sqrt()),
        "key_rms": float(result.heads.key.square().mean().sqrt()),
    }


def save_work(staging: Staging, work: SiteWork, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a work file and its facts, and record both as finished."""
    data = bytearray(work.nbytes)
    for name, place in work.places().items():
        tensor = tensors[name].contiguous()
        target = torch.frombuffer(data, dtype=tensor.dtype, count=tensor.numel(), offset=place.start)
        target.copy_(tensor.flatten())
    (staging.folder / work.shard).write_bytes(data)
    (staging.folder / f"{work.shard}.json").write_text(json.dumps(facts))
    for name in (f"{work.shard}.json", work.shard):
        staging.record(name, hash_file(staging.folder / name))


def load_facts(staging_folder: Path, work: SiteWork) -> dict[str, Any]:
    """The facts of a finished work file."""
    facts: dict[str, Any] = json.loads((staging_folder / f"{work.shard}.json").read_text())
    return facts


def load_work(staging_folder: Path, work: SiteWork) -> dict[str, Tensor]:
    """The tensors of a finished work file."""
    data = bytearray((staging_folder / work.shard).read_bytes())
    places, result = work.places(), {}
    for name, dtype, shape in work.tensors:
        kind = torch_dtype(dtype)
        count = places[name].nbytes // kind.itemsize
        result[name] = torch.frombuffer(data, dtype=kind, count=count, offset=places[name].start).view(shape)
    return result
