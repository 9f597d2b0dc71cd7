"""How long to uptrain, and what that takes: steps, tokens, operations, memory, hours. Closed forms, no measurements."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gqaconvert.errors import InputError
from gqaconvert.families.config import HEAD_DIM, HEADS, HIDDEN, LARGEST_SIZE, LAYERS, VOCABULARY
from gqaconvert.inspection import Checkpoint
from gqaconvert.kvcache.costs import Gpu
from gqaconvert.kvcache.weights import weights_of_checkpoint

_INNER = ("intermediate_size", "ffn_hidden_size", "n_inner", "d_ff")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_USED = ("num_experts_per_tok", "moe_k", "moe_topk")


@dataclass(frozen=True)
class Base:
    """A pre-trained model whose training budget was published.

    Attributes:
        tokens: of its pre-training.
        source: where that is said.
    """

    tokens: int
    source: str


_T, _B = 10**12, 10**9
_OLMO_CARD = "model card of allenai/OLMo-7B-0724-hf, table"
_LLAMA1, _LLAMA2 = "Touvron et al. 2023, arXiv 2302.13971, table 2", "Touvron et al. 2023, arXiv 2307.09288, table 1"
_OLMO, _SMOLLM = "model card of allenai/OLMo-7B-hf, table", "huggingface.co/blog/smollm"
_SMOLLM2, _GEMMA = "Ben Allal et al. 2025, arXiv 2502.02737", "Gemma Team 2024, arXiv 2403.08295"
_FALCON, _FALCON_RW = "Almazrouei et al. 2023, arXiv 2311.16867", "model cards of tiiuae/falcon-rw-1b and -7b"

BASES: Mapping[str, Base] = {
    # Names of Hub repositories without their owner, in small letters.
    "llama-7b": Base(_T, _LLAMA1), "llama-13b": Base(_T, _LLAMA1),
    "llama-30b": Base(1400 * _B, _LLAMA1), "llama-65b": Base(1400 * _B, _LLAMA1),
    "llama-2-7b-hf": Base(2 * _T, _LLAMA2), "llama-2-13b-hf": Base(2 * _T, _LLAMA2),
    "llama-2-70b-hf": Base(2 * _T, _LLAMA2),
    "olmo-1b-hf": Base(3 * _T, _OLMO), "olmo-7b-hf": Base(2500 * _B, _OLMO),
    "olmo-1b-0724-hf": Base(3050 * _B, _OLMO_CARD), "olmo-7b-0724-hf": Base(2750 * _B, _OLMO_CARD),
    "phi-1_5": Base(150 * _B, "model card of microsoft/phi-1_5"),
    "phi-2": Base(1400 * _B, "model card of microsoft/phi-2"),
    "stablelm-2-1_6b": Base(2 * _T, "Bellagente et al. 2024, arXiv 2402.17834"),
    "gemma-2b": Base(3 * _T, _GEMMA), "gemma-7b": Base(6 * _T, _GEMMA),
    "smollm-135m": Base(600 * _B, _SMOLLM), "smollm-360m": Base(600 * _B, _SMOLLM), "smollm-1.7b": Base(_T, _SMOLLM),
    "smollm2-135m": Base(2 * _T, _SMOLLM2), "smollm2-360m": Base(4 * _T, _SMOLLM2),
    "smollm2-1.7b": Base(11 * _T, _SMOLLM2),
    "falcon-7b": Base(1500 * _B, _FALCON), "falcon-40b": Base(_T, _FALCON),
    "falcon-rw-1b": Base(350 * _B, _FALCON_RW), "falcon-rw-7b": Base(350 * _B, _FALCON_RW),
    "tiny-llama": Base(1500 * 8 * 256, "examples/train_tiny_llama.py: 1500 steps of 8 x 256 tokens"),
}  # fmt: skip
"""Well-known bases and the tokens of their pre-training."""


def known_base(name: str, provenance: Mapping[str, Any] | None = None) -> Base | None:
    """The published budget of a model, or of the one that it was made from, by name; None if it is not known.

    Args:
        name: Hub id or folder.
        provenance: what gqaconvert.json says of the model.
    """
    while isinstance(provenance, Mapping) and isinstance(source := provenance.get("source"), Mapping):
        name, provenance = str(source.get("id", "")), source.get("provenance")
    return BASES.get(name.rstrip("/").rpartition("/")[2].lower())


@dataclass(frozen=True)
class Budget:
    """How long to train.

    Attributes:
        steps: optimiser steps.
        tokens: steps x tokens a step.
        alpha: that as a part of the pre-training, None where its length is not known.
        pretrain_tokens: of the pre-training.
        source: where that figure comes from; None if the user gave it.
    """

    steps: int
    tokens: int
    alpha: float | None = None
    pretrain_tokens: int | None = None
    source: str | None = None


def resolve(
    *,
    tokens_per_step: int,
    steps: int | None = None,
    tokens: int | None = None,
    alpha: float | None = None,
    pretrain_tokens: int | None = None,
    base: Base | None = None,
) -> Budget:
    """The budget that the user means; whole steps, rounded up.

    Args:
        tokens_per_step: of the global batch.
        steps: optimiser steps.
        tokens: tokens in all.
        alpha: part of the pre-training; the paper (section 3.1) takes 0.05.
        pretrain_tokens: what alpha is a part of; None to take the base's.
        base: the published budget of the model, if it is known.

    Raises:
        InputError: none or several of steps, tokens and alpha; one that is not positive; alpha of what is not known.
    """
    given = {"--steps": steps, "--tokens": tokens, "--alpha": alpha}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise InputError(
            f"how long to train has to be said exactly once, not by {' and '.join(named) or 'nothing'}",
            hint="one of --steps, --tokens, --alpha",
        )
    for name, value in {**given, "--pretrain-tokens": pretrain_tokens}.items():
        if value is not None and value <= 0:
            raise InputError(f"{name} {value:g} is not positive")
    source = base.source if base and pretrain_tokens is None else None
    pretrained = pretrain_tokens if pretrain_tokens is not None else base.tokens if base else None
    if alpha is not None:
        if alpha > 1:
            raise InputError(f"--alpha {alpha:g}: it is a part of the pre-training, in (0, 1]", hint="5 % is 0.05")
        if pretrained is None:
            raise InputError(
                "--alpha is a part of the pre-training, and how long that was is in no config.json",
                hint="--pretrain-tokens, for example 2T; or --steps or --tokens",
            )
        tokens = max(1, round(alpha * pretrained))
    if steps is None:
        assert tokens is not None
        steps = -(-tokens // tokens_per_step)
    total = steps * tokens_per_step
    return Budget(steps, total, total / pretrained if pretrained else None, pretrained, source)


@dataclass(frozen=True)
class ModelShape:
    """What the costs of training a model follow from.

    Attributes:
        parameters: all of them.
        active: those that are multiplied with for each token: no table that is only looked up, and of experts those
            that a token meets.
        attention: of all, in projections of the attention.
        kv: of these, in K and V.
        layers: decoder layers.
        width: num_attention_heads x head_dim.
        hidden: hidden size.
        inner: width of the MLP.
        vocabulary: size.
    """

    parameters: int
    active: int
    attention: int
    kv: int
    layers: int
    width: int
    hidden: int
    inner: int
    vocabulary: int

    def trained(self, trainable: str) -> int:
        """Parameters that are trained: of all, of the attention, or K and V."""
        return {"all": self.parameters, "attention": self.attention, "kv": self.kv}[trainable]


def shape_of(checkpoint: Checkpoint) -> ModelShape:
    """A checkpoint's shape, from its headers and config.

    Raises:
        CheckpointError: the config has absurd numbers.
    """
    config, weights = checkpoint.config, weights_of_checkpoint(checkpoint)
    heads = config.count(HEADS) or 1
    hidden = config.count(HIDDEN) or 1
    width = heads * (config.count(HEAD_DIM) or hidden // heads)
    experts, used = config.count(_EXPERTS), config.count(_EXPERTS_USED)
    entries = checkpoint.index.entries
    resting = 0
    if experts and used:
        of_experts = sum(entry.numel for name, entry in entries.items() if ".experts." in name)
        resting = of_experts - of_experts * used // experts
    return ModelShape(
        parameters=weights.parameters,
        active=weights.parameters - weights.idle_parameters - resting,
        attention=sum(tensor.entry.numel for site in checkpoint.sites for tensor in site.tensors),
        kv=weights.kv_parameters,
        layers=config.count(LAYERS) or 1,
        width=width,
        hidden=hidden,
        inner=config.count(_INNER, LARGEST_SIZE) or 4 * hidden,
        vocabulary=config.count(VOCABULARY, LARGEST_SIZE) or 0,
    )


def forward_flops(shape: ModelShape, seq_len: int) -> int:
    """Operations of the forward pass for each token.

    2 for each active parameter, and 4 L H Q T for the attention's scores and sums: a third of what training takes,
    6 N + 12 L H Q T (Chowdhery et al. 2022, PaLM, appendix B). As there, a causal mask saves nothing.
    """
    return 2 * shape.active + 4 * shape.layers * shape.width * seq_len


def training_flops(
    shape: ModelShape, seq_len: int, *, trainable: str = "all", teacher: ModelShape | None = None
) -> int:
    """Operations of training for each token: what the model needs, without any recomputation; for the MFU.

    The backward pass takes as much again for the activations' gradients, and as much again for the weights' where all
    are trained. A teacher adds its forward pass.
    """
    forward = forward_flops(shape, seq_len)
    scores = forward - 2 * shape.active
    trained = shape.active if trainable == "all" else shape.trained(trainable)
    backward = 2 * shape.active + 2 * trained + 2 * scores
    return forward + backward + (forward_flops(teacher, seq_len) if teacher else 0)


@dataclass(frozen=True)
class Costs:
    """What a run takes.

    Attributes:
        flops: all operations, recomputed activations included.
        model_flops_per_token: without those; what the MFU is measured by.
        weights: bytes on each device, and so the others.
        gradients: of the trained weights.
        optimizer: its state.
        teacher: weights of the teacher that are not the student's too.
        activations: of a micro-batch, roughly.
        logits: of a micro-batch, their float32 copies and gradient, roughly.
        seconds: on the accelerators at the assumed utilisation; None if their speed is not known.
        utilisation: assumed.
    """

    flops: int
    model_flops_per_token: int
    weights: int
    gradients: int
    optimizer: int
    teacher: int
    activations: int
    logits: int
    seconds: float | None
    utilisation: float

    @property
    def memory(self) -> int:
        """Bytes on each device."""
        parts = self.weights, self.gradients, self.optimizer, self.teacher, self.activations, self.logits
        return sum(parts)

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {**vars(self), "memory": self.memory}


_STATE_BYTES = {"adamw": 8, "adamw8bit": 2}


def costs(
    shape: ModelShape,
    budget: Budget,
    *,
    seq_len: int,
    micro_batch: int,
    trainable: str = "all",
    teacher: ModelShape | None = None,
    bf16: bool = False,
    activation_checkpointing: bool = False,
    optimizer: str = "adamw",
    devices: int = 1,
    gpu: Gpu | None = None,
    utilisation: float = 0.4,
) -> Costs:
    """Costs of a run.

    Args:
        shape: of the model that is trained.
        budget: how long.
        seq_len: T, tokens a row.
        micro_batch: rows at once on each device.
        trainable: "all", "attention" or "kv"; with "kv" a teacher shares all weights but its K and V.
        teacher: shape of the teacher of a distillation.
        bf16: mixed precision: weights, gradients and optimiser in float32, activations in bfloat16.
        activation_checkpointing: keep a layer's input only, and compute the rest again.
        optimizer: "adamw" or "adamw8bit".
        devices: over which weights, gradients and optimiser are sharded.
        gpu: what each of them is.
        utilisation: part of its peak that is reached.
    """
    trained = shape.trained(trainable)
    per_token = training_flops(shape, seq_len, trainable=trainable, teacher=teacher)
    flops = budget.tokens * (per_token + (forward_flops(shape, seq_len) if activation_checkpointing else 0))
    kept = 0 if teacher is None else teacher.kv if trainable == "kv" else teacher.parameters
    size = 2 if bf16 else 4
    tokens = micro_batch * seq_len
    layer = _layer_activations(shape)
    activations = shape.layers * (shape.hidden if activation_checkpointing else layer)
    activations += layer if activation_checkpointing else 0
    seconds = flops / (gpu.flops * utilisation * devices) if gpu and gpu.flops else None
    return Costs(
        flops=flops,
        model_flops_per_token=per_token,
        weights=4 * shape.parameters // devices,
        gradients=4 * trained // devices,
        optimizer=_STATE_BYTES[optimizer] * trained // devices,
        teacher=size * kept // devices,
        activations=tokens * activations * size,
        logits=tokens * shape.vocabulary * 4 * (3 if teacher is None else 6),
        seconds=seconds,
        utilisation=utilisation,
    )


def _layer_activations(shape: ModelShape) -> int:
    """Numbers that a layer with a gated MLP keeps for each token, with a fused attention.

    Two norms (4 times the hidden size each: input, normalised, scaled, and the residual), Q, repeated K and V, output
    of the attention twice and the halves of the rotation, four times the inner width in the MLP. Counted against
    autograd in tests.
    """
    return 8 * shape.hidden + 6 * shape.width + 4 * shape.inner
