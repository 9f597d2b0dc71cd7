"""Refine all merged sites together, after each was refined alone: the whole model against the source's predictions.

What a layer cannot mend by itself later ones can, and an error counts as much as it matters for the next token. Unlike
everything before it, this needs the whole model in memory: the source in float32, once more the attention that is
fitted, its gradients, and the activations of one window. An interrupted run repeats this pass from its beginning.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gqaconvert.calibration import HELD_OUT, calibration_batches, layer_weights, target_weights
from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.staging import Staging
from gqaconvert.checkpoint.writer import Advance
from gqaconvert.errors import CheckpointError
from gqaconvert.memory import require_memory
from gqaconvert.merge.refine import JointSettings, divergence, refine_jointly
from gqaconvert.planning import ConversionPlan
from gqaconvert.reading import SourceReader
from gqaconvert.shells import Shell, layer_prefix, read_float32
from gqaconvert.site_merging import OnStep, load_facts, load_work, rounded_tensors, save_work


def refine_sites_jointly(
    plan: ConversionPlan,
    folder: LocalFolder,
    staging: Staging,
    sources: SourceReader,
    trusted: frozenset[str],
    advance: Advance,
    on_step: OnStep,
) -> None:
    """Write the final work file of every site from the layer-wise ones.

    A pass that does not bring the held-out windows closer to the source is undone.

    Raises:
        UnsupportedModelError: the files' names are not those of the stock class.
        CheckpointError: the divergence is not finite.
    """
    steps = plan.recipe.joint
    assert steps is not None
    if all(work.shard in trusted for work in plan.work):
        advance(sum(work.nbytes for work in plan.work))
        return
    before = [load_work(staging.folder, work) for work in plan.layerwise]
    original, merged = _models(plan, sources, before)
    names = [work.parameters for work in plan.work]
    attentions = [layer.get_submodule(plan.family.attention) for layer in merged.layers]
    for attention, inner in zip(attentions, names, strict=True):
        for name in inner:
            attention.get_parameter(name).requires_grad_(True)
    batches = calibration_batches(plan, folder)
    fitted, held = batches[:-HELD_OUT], batches[-HELD_OUT:]
    start = _mean_divergence(original.model, merged.model, held)
    refine_jointly(
        original.model, merged.model, attentions, fitted, JointSettings(steps=steps, seed=plan.recipe.seed),
        progress=lambda step, loss: on_step(step + 1, steps, loss),
    )  # fmt: skip
    end = _mean_divergence(original.model, merged.model, held)
    if not torch.isfinite(torch.tensor(end)):
        raise CheckpointError("the joint refinement gives NaN or infinite values", hint="leave --joint out")
    facts = {"joint_steps": steps, "divergence_before": start, "divergence_after": min(start, end)}
    for work, layerwise, alone, attention, inner in zip(
        plan.work, plan.layerwise, before, attentions, names, strict=True
    ):
        tensors = alone
        if end < start:
            found = {name: attention.get_parameter(place).detach() for place, name in inner.items()}
            tensors = rounded_tensors(work, found)
        save_work(staging, work, tensors, load_facts(staging.folder, layerwise) | facts)
        advance(work.nbytes)


def require_memory_for(plan: ConversionPlan) -> None:
    """Refuse, before the layers are refined one by one, what would not fit in the end.

    Raises:
        EnvironmentFailure: the models and what is fitted need more memory than is free.
    """
    everything = sum(entry.numel for entry in plan.checkpoint.index.entries.values())
    fitted = sum(math.prod(shape) for work in plan.work for _, _, shape in work.tensors)
    # float32: the source; the merged attention, its gradients and momentum.
    require_memory(4 * (everything + 3 * fitted), "--joint", hint="leave it out, or use a machine with more memory")


def _models(
    plan: ConversionPlan, sources: SourceReader, merged_tensors: Sequence[dict[str, Tensor]]
) -> tuple[Shell, Shell]:
    """Both models, complete; what is equal in both is in memory once."""
    weights = {name: read_float32(entry, sources) for name, entry in plan.checkpoint.index.entries.items()}
    original, merged = Shell.of(plan.checkpoint.config.raw, plan), Shell.of(plan.config, plan)
    original = original.filled(weights)
    for work, tensors in zip(plan.work, merged_tensors, strict=True):
        prefix = layer_prefix(plan, work)
        inside = target_weights(plan, work, layer_weights(plan, work, sources))
        weights |= {f"{prefix}{name}": tensor for name, tensor in inside.items()}
        weights |= {name: tensor.to(torch.float32) for name, tensor in tensors.items()}
    return original, merged.filled(weights)


@torch.no_grad()
def _mean_divergence(original: nn.Module, merged: nn.Module, batches: Sequence[Tensor]) -> float:
    return sum(float(divergence(original, merged, batch)) for batch in batches) / len(batches)
