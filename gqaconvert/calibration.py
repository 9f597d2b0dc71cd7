"""Merge attention sites on calibration text, one layer after the other, in the memory of one layer.

Both models, the source and the one being merged, exist as empty shells of stock transformers; for each layer its
weights are read from the checkpoint, the layer is merged (and refined), its rounded result goes to a work file, and
both residual streams move on. An interrupted run repeats only the forward passes of finished layers.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.headers import TensorEntry
from gqaconvert.checkpoint.staging import Staging
from gqaconvert.checkpoint.writer import Advance
from gqaconvert.errors import CheckpointError, InputError, UnsupportedModelError
from gqaconvert.families import Part
from gqaconvert.families.blocks import source_heads
from gqaconvert.families.config import CONTEXT, LARGEST_SIZE, VOCABULARY
from gqaconvert.families.sites import rewritten
from gqaconvert.merge.moments import Call, record_calls
from gqaconvert.merge.refine import RefineSettings, Streams, merge_layer
from gqaconvert.merge.sites import store_heads
from gqaconvert.merge.subspace import MergeResult
from gqaconvert.planning import ConversionPlan, SiteWork
from gqaconvert.reading import SourceReader
from gqaconvert.site_merging import (
    OnSite,
    diagnostics,
    load_facts,
    load_work,
    merge_heads,
    read_heads,
    read_tensor,
    rounded,
    rounded_tensors,
    save_work,
)
from gqaconvert.texts import load_tokenizer, read_documents

WINDOW = 512
"""Tokens of a calibration window, where the model's context allows."""
_HELD_OUT = 2


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
    batches = _batches(plan, folder)
    source, target = _Shell.of(plan.checkpoint.config.raw, plan), _Shell.of(plan.config, plan)
    source.fill_outside(plan, sources)
    calls = record_calls(source.model, source.layers, batches[0])
    embedded = [record_calls(source.model, source.layers[:1], batch)[0].hidden for batch in batches]
    streams = Streams(embedded, embedded)
    for number, work in enumerate(plan.work):
        weights = _layer_weights(plan, work, sources)
        original = source.layer(number, weights)
        merged = target.layer(number, weights | _target_weights(plan, work, weights))
        merger = _LayerMerger(plan, work, original, merged, calls[number], staging, sources)
        streams, facts = merger.run(streams, finished=work.shard in trusted)
        advance(work.nbytes)
        on_site(facts)


def _settings(plan: ConversionPlan) -> RefineSettings:
    refine = plan.recipe.refine
    if refine == "auto":
        return RefineSettings(automatic=True, seed=plan.recipe.seed, held_out=_HELD_OUT)
    return RefineSettings(steps=int(refine or 0), seed=plan.recipe.seed, held_out=_HELD_OUT)


def _batches(plan: ConversionPlan, folder: LocalFolder) -> list[Tensor]:
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
    if count <= _HELD_OUT:
        raise InputError(
            f"{calibration.name} has {len(tokens):,} tokens: calibration needs at least {(_HELD_OUT + 1) * window:,}"
        )
    vocabulary = config.count(VOCABULARY, LARGEST_SIZE)
    if vocabulary is not None and max(tokens) >= vocabulary:
        raise InputError(f"the tokenizer gives ids up to {max(tokens)}, the model's vocabulary has {vocabulary}")
    return [torch.tensor(tokens[start * window : (start + 1) * window])[None] for start in range(count)]


@dataclass(frozen=True)
class _Shell:
    """A stock model without weights, whose decoder layers are given weights one at a time."""

    model: nn.Module
    layers: list[nn.Module]

    @classmethod
    def of(cls, config: Mapping[str, Any], plan: ConversionPlan) -> "_Shell":
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        typed = CONFIG_MAPPING[config["model_type"]].from_dict(dict(config))
        typed._attn_implementation = "sdpa"
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(typed, dtype=torch.float32)  # type: ignore[no-untyped-call]
        model.eval()
        for name, module in list(model.named_modules()):
            # Rotary tables are computed at construction, not stored: once more, with real numbers.
            if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
                parent, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(parent), attribute, type(module)(config=typed))
        try:
            layers = [model.get_submodule(_layer_prefix(plan, work).rstrip(".")) for work in plan.work]
        except AttributeError:
            raise _not_singly(plan, f"no module {_layer_prefix(plan, plan.work[0])}") from None
        return cls(model, layers)

    def fill_outside(self, plan: ConversionPlan, sources: SourceReader) -> None:
        """Load what stands before the layers: embeddings. What comes after them is never run."""
        stack = _layer_prefix(plan, plan.work[0]).rstrip(".").rpartition(".")[0] + "."
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        skipped = {id(parameter) for parameter in head.parameters()} if head is not None else set()
        inputs = {id(parameter) for parameter in self.model.get_input_embeddings().parameters()}  # type: ignore[operator]
        for name, parameter in list(self.model.named_parameters()):
            if name.startswith(stack) or (id(parameter) in skipped and id(parameter) not in inputs):
                continue
            entry = plan.checkpoint.index.entries.get(name)
            if entry is None:
                raise _not_singly(plan, f"no tensor {name}")
            parent, _, attribute = name.rpartition(".")
            loaded = nn.Parameter(_read(entry, sources), requires_grad=False)
            setattr(self.model.get_submodule(parent), attribute, loaded)

    def layer(self, number: int, weights: Mapping[str, Tensor]) -> nn.Module:
        """A copy of one layer with weights; names within the layer."""
        layer = copy.deepcopy(self.layers[number])
        names = {name for name, _ in layer.named_parameters()} | {name for name, _ in layer.named_buffers()}
        if names - weights.keys():
            raise InputError(
                f"the stock class expects {sorted(names - weights.keys())[:3]} in a layer; the files differ"
            )
        layer.load_state_dict({name: weights[name] for name in names}, strict=True, assign=True)
        return layer.requires_grad_(False)


def _layer_prefix(plan: ConversionPlan, work: SiteWork) -> str:
    """What a site's layer's tensors begin with, e.g. ``model.layers.3.``."""
    return work.site.prefix.removesuffix(f"{plan.family.attention}.")


def _not_singly(plan: ConversionPlan, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"calibration loads layers one by one, and the files of this {plan.family.name} model are not named like the "
        f"modules of the stock class ({what})",
        hint="without --calibrate the merge uses the weights only",
    )


def _read(entry: TensorEntry, sources: SourceReader) -> Tensor:
    return read_tensor(entry, sources).to(torch.float32)


def _layer_weights(plan: ConversionPlan, work: SiteWork, sources: SourceReader) -> dict[str, Tensor]:
    prefix = _layer_prefix(plan, work)
    return {
        name[len(prefix) :]: _read(entry, sources)
        for name, entry in plan.checkpoint.index.entries.items()
        if name.startswith(prefix)
    }


def _target_weights(plan: ConversionPlan, work: SiteWork, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What differs in the merged layer: empty projections in their new shapes, key norms pooled by the mean."""
    prefix = _layer_prefix(plan, work)
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
        for name in self._names():
            attention.get_parameter(name).requires_grad_(True)
        refinement, moved = merge_layer(
            self.original, self.merged, plan.family.attention, self.call, streams, merge, settings,
            bias=any(leaf == "bias" for _, leaf, _ in rewritten(self.work.site)),
            adds_to_stream=plan.family.attention_adds,
        )  # fmt: skip
        if not torch.isfinite(torch.tensor(refinement.after)):
            raise CheckpointError(f"{self.work.site.prefix}: the calibration gives NaN or infinite values")
        if refinement.steps:
            fitted = {name: attention.get_parameter(inner).detach() for inner, name in self._names().items()}
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

    def _names(self) -> dict[str, str]:
        """Parameters of the attention module that are rewritten -> the names of their tensors."""
        return {name.removeprefix(self.work.site.prefix): name for name, _, _ in self.work.tensors}

    def _write(self, tensors: Mapping[str, Tensor]) -> None:
        attention = self.merged.get_submodule(self.plan.family.attention)
        with torch.no_grad():
            for inner, name in self._names().items():
                attention.get_parameter(inner).copy_(tensors[name])
