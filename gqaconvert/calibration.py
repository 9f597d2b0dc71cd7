"""Merge attention sites on calibration text, one layer after the other, in the memory of one layer.

Both models, the source and the one being merged, exist as empty shells of stock transformers; for each layer its
weights are read from the checkpoint, the layer is merged (and refined), its rounded result goes to a work file, and
both residual streams move on. An interrupted run repeats only the forward passes of finished layers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.staging import Staging
from gqaconvert.checkpoint.writer import Advance
from gqaconvert.errors import CheckpointError, InputError
from gqaconvert.families import Part
from gqaconvert.families.blocks import source_heads
from gqaconvert.families.config import CONTEXT, LARGEST_SIZE, VOCABULARY
from gqaconvert.families.sites import rewritten
from gqaconvert.merge.groups import MergeResult
from gqaconvert.merge.moments import Call, attention_entropy, record_calls
from gqaconvert.merge.refine import RefineSettings, Streams, merge_layer
from gqaconvert.merge.sites import store_heads
from gqaconvert.planning import ConversionPlan, SiteWork
from gqaconvert.reading import SourceReader
from gqaconvert.shells import Shell, layer_prefix, read_float32
from gqaconvert.site_merging import (
    OnSite,
    diagnostics,
    load_facts,
    load_work,
    merge_heads,
    read_heads,
    rounded,
    rounded_tensors,
    save_work,
)
from gqaconvert.texts import load_tokenizer, read_documents

WINDOW = 512
"""Tokens of a calibration window, where the model's context allows."""
HELD_OUT = 2
"""Windows at the end of the text that nothing is fitted to."""


def merge_calibrated(
    plan: ConversionPlan,
    folder: LocalFolder,
    staging: Staging,
    sources: SourceReader,
    trusted: frozenset[str],
    advance: Advance,
    on_site: OnSite,
) -> None:
    """Write the work files of all sites, in the order of the layers.

    Raises:
        MissingExtraError: transformers is not installed.
        UnsupportedModelError: the files' names are not those of the stock class, so layers cannot be loaded singly.
        InputError: the text is too short.
    """
    batches = calibration_batches(plan, folder)
    source, target = Shell.of(plan.checkpoint.config.raw, plan), Shell.of(plan.config, plan)
    source.fill_outside(sources)
    calls = record_calls(source.model, source.layers, batches[0])
    with source.eager():
        eager_calls = record_calls(source.model, source.layers, batches[0])
    embedded = [record_calls(source.model, source.layers[:1], batch)[0].hidden for batch in batches]
    streams = Streams(embedded, embedded)
    for number, work in enumerate(plan.layerwise):
        weights = layer_weights(plan, work, sources)
        original = source.layer(number, weights)
        merged = target.layer(number, weights | target_weights(plan, work, weights))
        merger = _LayerMerger(plan, work, original, merged, calls[number], eager_calls[number], staging, sources)
        streams, facts = merger.run(streams, finished=work.shard in trusted)
        advance(work.nbytes)
        on_site(facts)


def _settings(plan: ConversionPlan) -> RefineSettings:
    refine = plan.recipe.refine
    if refine == "auto":
        return RefineSettings(automatic=True, seed=plan.recipe.seed, held_out=HELD_OUT)
    return RefineSettings(steps=int(refine or 0), seed=plan.recipe.seed, held_out=HELD_OUT)


def calibration_batches(plan: ConversionPlan, folder: LocalFolder) -> list[Tensor]:
    """The calibration text as windows of tokens, (1, window) each.

    Raises:
        MissingExtraError: transformers is not installed.
        InputError: no usable tokenizer, or too little text.
    """
    calibration = plan.recipe.calibration
    assert calibration is not None
    tokenizer = load_tokenizer(folder.root)
    config = plan.checkpoint.config
    window = min(WINDOW, config.count(CONTEXT, LARGEST_SIZE) or WINDOW)
    tokens: list[int] = []
    for document in read_documents(calibration.name):
        tokens += tokenizer(document, verbose=False)["input_ids"]
        if len(tokens) >= calibration.tokens:
            break
    count = min(len(tokens), calibration.tokens) // window
    if count <= HELD_OUT:
        raise InputError(
            f"{calibration.name} has {len(tokens):,} tokens: calibration needs at least {(HELD_OUT + 1) * window:,}"
        )
    vocabulary = config.count(VOCABULARY, LARGEST_SIZE)
    if vocabulary is not None and max(tokens) >= vocabulary:
        raise InputError(f"the tokenizer gives ids up to {max(tokens)}, the model's vocabulary has {vocabulary}")
    return [torch.tensor(tokens[start * window : (start + 1) * window])[None] for start in range(count)]


def layer_weights(plan: ConversionPlan, work: SiteWork, sources: SourceReader) -> dict[str, Tensor]:
    """All tensors of a site's layer in float32; names within the layer."""
    prefix = layer_prefix(plan, work)
    return {
        name[len(prefix) :]: read_float32(entry, sources)
        for name, entry in plan.checkpoint.index.entries.items()
        if name.startswith(prefix)
    }


def target_weights(plan: ConversionPlan, work: SiteWork, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What differs in the merged layer: empty projections in their new shapes, key norms pooled by the mean."""
    prefix = layer_prefix(plan, work)
    result = {name[len(prefix) :]: torch.zeros(shape) for name, _, shape in work.tensors}
    before, after = plan.source_geometry.num_key_value_heads, plan.target_geometry.num_key_value_heads
    lists: dict[str, dict[int, Tensor]] = {}
    for tensor in work.site.tensors:
        name = tensor.entry.name[len(prefix) :]
        if tensor.part is Part.KEY_NORM:
            shape = weights[name].shape
            pooled = weights[name].double().reshape(after, before // after, -1).mean(1)
            result[name] = pooled.reshape(shape[0] * after // before, *shape[1:]).float()
        elif tensor.part is Part.KEY_NORM_LIST:
            lists.setdefault(tensor.leaf, {})[tensor.number] = weights[name]
    for leaf, norms in lists.items():
        name = next(t.name for t in work.site.tensors if t.part is Part.KEY_NORM_LIST)
        for head in range(after):
            group = [norms[number].double() for number in source_heads(head, before, after)]
            result[f"{plan.family.attention}.{name}.norms.{head}.{leaf}"] = torch.stack(group).mean(0).float()
    return result


@dataclass(frozen=True)
class _LayerMerger:
    """One layer of both models, and where its result goes."""

    plan: ConversionPlan
    work: SiteWork
    original: nn.Module
    merged: nn.Module
    call: Call
    eager_call: Call
    staging: Staging
    sources: SourceReader

    def run(self, streams: Streams, *, finished: bool) -> tuple[Streams, Mapping[str, Any]]:
        """Merge, refine, round and save; the streams at the layer's output are those of the rounded weights."""
        if finished:
            tensors = load_work(self.staging.folder, self.work)
            facts = load_facts(self.staging.folder, self.work)
            with torch.no_grad():
                outputs = [self.call.run(self.original, hidden) for hidden in streams.original]
        else:
            outputs, tensors, facts = self._fit(streams)
            self._write(tensors)
            facts |= self._entropies(streams)
            save_work(self.staging, self.work, tensors, facts)
        self._write(tensors)
        with torch.no_grad():
            drifted = [self.call.run(self.merged, hidden) for hidden in streams.merged]
        return Streams(outputs, drifted), facts

    def _fit(self, streams: Streams) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Any]]:
        plan, settings = self.plan, _settings(self.plan)
        heads = read_heads(plan, self.work, self.sources)
        results: list[MergeResult] = []

        def merge(moment: Tensor) -> None:
            results.append(merge_heads(plan, self.work, heads, moment))
            self._write(store_heads(results[0].heads, self.work.site, plan.layouts[1], plan.target_geometry))

        attention = self.merged.get_submodule(plan.family.attention)
        for name in self.work.parameters:
            attention.get_parameter(name).requires_grad_(True)
        refinement, moved = merge_layer(
            self.original, self.merged, plan.family.attention, self.call, streams, merge, settings,
            bias=any(leaf == "bias" for _, leaf, _ in rewritten(self.work.site)),
            adds_to_stream=plan.family.attention_adds,
        )  # fmt: skip
        if not torch.isfinite(torch.tensor(refinement.after)):
            raise CheckpointError(f"{self.work.site.prefix}: the calibration gives NaN or infinite values")
        if refinement.steps:
            fitted = {name: attention.get_parameter(inner).detach() for inner, name in self.work.parameters.items()}
            tensors = rounded_tensors(self.work, fitted)
        else:
            tensors = rounded(plan, self.work, results[0].heads)
        facts = {
            **diagnostics(self.work, heads, results[0]),
            "error_before": refinement.before,
            "error_after": refinement.after,
            "steps": refinement.steps,
        }
        return moved.original, tensors, facts

    def _entropies(self, streams: Streams) -> dict[str, float | None]:
        """Of the last held-out window: sharper or flatter attention than the source's shows a merge of K gone wrong."""
        name = self.plan.family.attention
        sides = {
            "source_attention_entropy": (self.original, streams.original[-1]),
            "attention_entropy": (self.merged, streams.merged[-1]),
        }
        return {
            key: attention_entropy(layer, layer.get_submodule(name), self.eager_call, hidden)
            for key, (layer, hidden) in sides.items()
        }

    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        attention = self.merged.get_submodule(self.plan.family.attention)
        with torch.no_grad():
            for inner, name in self.work.parameters.items():
                attention.get_parameter(inner).copy_(tensors[name])
