"""`gqaconvert estimate`: what a model's cache costs now and after a conversion, and what fits beside the weights."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from gqaconvert.checkpoint.dtypes import TORCH_NAMES
from gqaconvert.checkpoint.source import open_source
from gqaconvert.errors import CheckpointError, GqaConvertError, HeadCountError, InputError
from gqaconvert.families import family_of, get_family
from gqaconvert.families.config import ModelConfig
from gqaconvert.families.sites import AttentionGeometry, legal_kv_heads
from gqaconvert.inspection import Checkpoint, read_checkpoint
from gqaconvert.kvcache.costs import DecodeBound, Gpu, UptrainingCost, decode_bound, uptraining_cost
from gqaconvert.kvcache.dtypes import CACHE_DTYPES, CacheDtype
from gqaconvert.kvcache.layers import (
    AttentionCache,
    CacheModel,
    CacheSettings,
    CrossCache,
    LatentCache,
    cache_size,
    summary,
)
from gqaconvert.kvcache.models import cache_model, fitted
from gqaconvert.kvcache.weights import Weights, weights_of_checkpoint, weights_of_config

SCHEMA = "gqaconvert.estimate/1"
DEFAULT_CONTEXTS = (4096, 32_768, 131_072)
_LONGEST = 2**27
_MAX_CONFIG = 2**24
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "ffn_config")


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        contexts: tokens a sequence; None for 4k, 32k, 128k as far as the model reaches.
        batches: sequences.
        kv_heads: counts to compare, None for all that a conversion can write.
        key: type of keys, None for the checkpoint's own.
        value: type of values, None for the checkpoint's own.
        settings: how the cache is held; its key and value types are set from the two above.
        encoder_tokens: encoder output length, None for the model's longest.
        gpu: one device.
        utilisation: part of its memory that weights and cache may fill.
        weights: bytes of the weights if they are stored in another form than the checkpoint's; None for those.
        alpha: part of the pre-training to repeat.
        pretrain_tokens: tokens of the pre-training.
    """

    contexts: tuple[int, ...] | None = None
    batches: tuple[int, ...] = (1,)
    kv_heads: tuple[int, ...] | None = None
    key: CacheDtype | None = None
    value: CacheDtype | None = None
    settings: CacheSettings = field(default_factory=CacheSettings)
    encoder_tokens: int | None = None
    gpu: Gpu | None = None
    utilisation: float = 0.9
    weights: int | None = None
    alpha: float | None = None
    pretrain_tokens: int | None = None


@dataclass(frozen=True)
class Row:
    """One KV-head count at one context and batch. All sizes in bytes.

    Attributes:
        cache_bytes: in steady state, summed over devices.
        cache_bytes_per_device: the same on each.
        parts: kind of layer -> bytes.
        prefill_peak_bytes: the most during a prefill that evicts layer by layer; cache_bytes without a policy.
        effective_factor: cache_bytes with the policy / without it.
        decode: bound of one decoding step; None where the weights that a step reads are not known.
    """

    num_key_value_heads: int | None
    context: int
    batch: int
    cache_bytes: int
    cache_bytes_per_device: int
    parts: Mapping[str, int]
    prefill_peak_bytes: int
    effective_factor: float
    decode: DecodeBound | None


@dataclass(frozen=True)
class Fit:
    """What fits on the devices beside the weights.

    Attributes:
        weight_bytes_per_device: divided evenly.
        cache_budget_per_device: bytes left; negative where the weights alone do not fit.
        largest_batch: context -> sequences of that length.
        longest_context: batch -> tokens, at most what the model was made for.
    """

    num_key_value_heads: int | None
    weight_bytes_per_device: int
    cache_budget_per_device: int
    largest_batch: Mapping[str, int]
    longest_context: Mapping[str, int]


@dataclass(frozen=True)
class Estimate:
    """The answer. See the README for the JSON schema."""

    source: str
    model: CacheModel
    settings: CacheSettings
    weights: Weights | None
    weight_bytes: Mapping[str, int]
    rows: tuple[Row, ...]
    gpu: Gpu | None
    utilisation: float
    fits: tuple[Fit, ...]
    uptraining: UptrainingCost | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form."""
        model, settings = self.model, self.settings
        return {
            "schema": SCHEMA,
            "source": self.source,
            "model": {
                "model_type": model.model_type,
                "num_hidden_layers": model.num_hidden_layers,
                "num_attention_heads": model.num_attention_heads,
                "num_key_value_heads": model.num_key_value_heads,
                "caches": dict(summary(model)),
                "pattern": model.pattern,
                "context": model.context,
            },
            "settings": {
                "key_dtype": settings.key.name,
                "value_dtype": settings.value.name,
                "state_dtype": settings.state.name,
                "tensor_parallel": settings.tensor_parallel,
                "block": settings.block,
                "encoder_tokens": settings.encoder_tokens,
                "runtime": settings.runtime,
                "expand_latent": settings.expand_latent,
                "policy": str(settings.policy) if settings.policy else None,
            },
            "weights": (
                {
                    "source": self.weights.source,
                    "parameters": self.weights.parameters,
                    "bytes": self.weights.nbytes,
                    "bytes_by_kv_heads": dict(self.weight_bytes),
                }
                if self.weights
                else None
            ),
            "rows": [asdict(row) for row in self.rows],
            "gpu": asdict(self.gpu) if self.gpu else None,
            "utilisation": self.utilisation,
            "fits": [asdict(fit) for fit in self.fits],
            "uptraining": asdict(self.uptraining) if self.uptraining else None,
            "notes": list(self.notes),
        }


def estimate(
    source: str,
    question: Question | None = None,
    *,
    revision: str | None = None,
    offline: bool = False,
    family: str | None = None,
) -> Estimate:
    """Size the cache of a checkpoint's folder, of a Hub id (only headers travel) or of a bare config.json.

    Raises:
        UnsupportedModelError: what the model caches is not known.
        HeadCountError: an asked KV-head count is not legal.
        InputError: contradictory or impossible settings.
        GqaConvertError: the source cannot be read.
    """
    question = question or Question()
    notes: list[str] = []
    config, checkpoint = _read(source, revision, offline, family)
    model = cache_model(config)
    if checkpoint and checkpoint.sites and model.num_key_value_heads is not None:
        geometry = checkpoint.sites[0].geometry
        model = fitted(model, geometry.num_key_value_heads, geometry.head_dim, geometry.value_head_dim)
    settings = _settings(config, model, question, notes)
    counts = _counts(model, config, checkpoint, question.kv_heads, family)
    contexts = question.contexts or _contexts(model)
    if model.context and max(contexts) > model.context:
        notes.append(f"the model was made for {model.context:,} tokens; longer contexts need its positions extended")
    weights = _weights(config, checkpoint, question, notes)
    mixture = any(config.text.get(key) for key in _EXPERTS)
    readable = weights if weights and not mixture and model.encoder_tokens is None else None
    if weights and readable is None:
        notes.append("no bound on decoding: a step does not read all weights of a mixture of experts or an encoder")
    rows, fits, sizes = [], [], {}
    for count in counts:
        shaped = model if count is None else model.with_kv_heads(count)
        present = model.num_key_value_heads or 1
        nbytes, parameters = weights.at(count or present, present) if weights else (0, 0)
        sizes[str(count)] = nbytes
        read = (nbytes - readable.idle_bytes, parameters - readable.idle_parameters) if readable else None
        rows += [_row(shaped, context, batch, settings, question, read)
                 for context in contexts for batch in question.batches]  # fmt: skip
        if question.gpu and weights:
            fits.append(_fit(shaped, nbytes, contexts, settings, question))
    if question.gpu and not weights:
        notes.append("the weights' size is not known from a bare config of this type: --weights SIZE gives it")
    return Estimate(
        source, model, settings, weights, sizes, tuple(rows), question.gpu, question.utilisation,
        tuple(fits), _uptraining(question, weights, notes), tuple(notes),
    )  # fmt: skip


def _read(
    source: str, revision: str | None, offline: bool, family: str | None
) -> tuple[ModelConfig, Checkpoint | None]:
    path = Path(source).expanduser()
    if not (path.suffix == ".json" and path.is_file()):
        checkpoint = read_checkpoint(open_source(source, revision=revision, offline=offline), family=family)
        for problem in checkpoint.index.problems:
            if problem.severity == "error":
                raise CheckpointError(f"{problem.subject}: {problem.message}")
        return checkpoint.config, checkpoint
    if path.stat().st_size > _MAX_CONFIG:
        raise CheckpointError(f"{path} is far too large for a config.json")
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return ModelConfig.of(document), None


def _settings(config: ModelConfig, model: CacheModel, question: Question, notes: list[str]) -> CacheSettings:
    stored = config.text.get("dtype") or config.text.get("torch_dtype") or config.raw.get("dtype")
    stored = str(stored or config.raw.get("torch_dtype") or "").removeprefix("torch.")
    own = CACHE_DTYPES.get(stored)
    if own is None:
        own = CACHE_DTYPES["bfloat16"]
        if question.key is None or question.value is None:
            notes.append("config.json names no type: the cache is taken as bfloat16")
    settings = replace(question.settings, key=question.key or own, value=question.value or own)
    layers = model.num_hidden_layers
    if settings.policy and any(layer >= layers for layer in settings.policy.skip_layers):
        raise InputError(f"--policy {settings.policy}: the model has only {layers} layers")
    if any(isinstance(layer, CrossCache) for layer in model.layers):
        encoder = model.encoder_tokens if question.encoder_tokens is None else question.encoder_tokens
        if encoder is None:
            raise InputError("the encoder's length decides the size of this cache", hint="--encoder-tokens N says it")
        settings = replace(settings, encoder_tokens=encoder)
    elif question.encoder_tokens is not None:
        raise InputError("--encoder-tokens: the model has no cross attention")
    return settings


def _counts(
    model: CacheModel,
    config: ModelConfig,
    checkpoint: Checkpoint | None,
    asked: tuple[int, ...] | None,
    family_name: str | None,
) -> tuple[int | None, ...]:
    present = model.num_key_value_heads
    if present is None:
        if asked:
            raise HeadCountError(f"{model.model_type} has no KV heads that could be merged")
        return (None,)
    legal = {present}
    try:
        family = (checkpoint.family if checkpoint else None) or (
            get_family(family_name) if family_name else family_of(config)
        )
        first = next(layer for layer in model.layers if isinstance(layer, AttentionCache))
        geometry = AttentionGeometry(model.num_attention_heads, present, first.key_dim, first.value_dim)
        if family.refusal is None:
            legal |= set(legal_kv_heads(family, config, geometry))
    except GqaConvertError:  # no family: it cannot be converted, so there is only the present count
        pass
    if asked is None:
        return tuple(sorted((count for count in legal if count <= present), reverse=True))
    for count in asked:
        if count not in legal:
            raise HeadCountError(
                f"{count} KV heads: not possible from {present} for {model.num_attention_heads} query heads",
                hint=f"possible counts: {', '.join(map(str, sorted(legal)))}",
            )
    return asked


def _contexts(model: CacheModel) -> tuple[int, ...]:
    if model.context is None:
        return DEFAULT_CONTEXTS
    return tuple(size for size in DEFAULT_CONTEXTS if size <= model.context) or (model.context,)


def _weights(
    config: ModelConfig, checkpoint: Checkpoint | None, question: Question, notes: list[str]
) -> Weights | None:
    stored = str(config.raw.get("dtype") or config.text.get("dtype") or config.raw.get("torch_dtype") or "bfloat16")
    stored = stored.removeprefix("torch.")
    found = (
        weights_of_checkpoint(checkpoint)
        if checkpoint
        else weights_of_config(config, stored)
        if stored in TORCH_NAMES.values()
        else None
    )
    if question.weights is None:
        return found
    if found is None:
        # Without the parameters, nothing is known of what a conversion saves of them.
        notes.append("the weights are taken as equally large for all KV-head counts")
        return Weights(question.weights, 0, 0, 0, 0, 0, "--weights")
    share = question.weights / found.nbytes
    return replace(
        found, nbytes=question.weights, kv_bytes=round(found.kv_bytes * share),
        idle_bytes=round(found.idle_bytes * share), source="--weights",
    )  # fmt: skip


def _row(
    model: CacheModel,
    context: int,
    batch: int,
    settings: CacheSettings,
    question: Question,
    read: tuple[int, int] | None,
) -> Row:
    size = cache_size(model, context, batch, settings)
    whole = cache_size(model, context, batch, replace(settings, policy=None)).total if settings.policy else size.total
    decode = None
    if read is not None and read[1] > 0:
        devices = settings.tensor_parallel
        flops = (2 * read[1] + _attention_flops(model, context, settings)) * batch // devices
        decode = decode_bound(question.gpu, -(-read[0] // devices) + size.per_device, flops)
    return Row(
        model.num_key_value_heads, context, batch, size.total, size.per_device,
        {kind: nbytes for kind, nbytes in size.parts.items() if nbytes}, size.prefill_peak,
        size.total / whole if whole else 1.0, decode,
    )  # fmt: skip


def _attention_flops(model: CacheModel, context: int, settings: CacheSettings) -> int:
    """Of one token: 2 for each element of the keys and values that each query head meets."""
    total = 0
    for layer in model.layers:
        if isinstance(layer, AttentionCache):
            met = min(context, layer.window) if layer.window else context
            if settings.policy and layer.window is None:
                met = settings.policy.entries(layer.layer, context)
            total += 2 * model.num_attention_heads * (layer.key_dim + layer.value_dim) * met
        elif isinstance(layer, LatentCache):
            total += 2 * layer.heads * (2 * layer.latent_dim + layer.rope_dim) * context
    return total


def _fit(
    model: CacheModel, weight_bytes: int, contexts: tuple[int, ...], settings: CacheSettings, question: Question
) -> Fit:
    assert question.gpu is not None
    share = -(-weight_bytes // settings.tensor_parallel)
    budget = int(question.gpu.memory * question.utilisation) - share

    def need(context: int, batch: int) -> int:
        # The worst moment has to fit, so with a policy it is the prefill that decides.
        return cache_size(model, context, batch, settings).prefill_peak // settings.tensor_parallel

    batches = {str(context): max(0, budget // max(need(context, 1), 1)) for context in contexts}
    limit = model.context or _LONGEST
    longest = {}
    for batch in question.batches:
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if need(middle, batch) <= budget else (low, middle - 1)
        longest[str(batch)] = low
    return Fit(model.num_key_value_heads, share, budget, batches, longest)


def _uptraining(question: Question, weights: Weights | None, notes: list[str]) -> UptrainingCost | None:
    if question.alpha is None and question.pretrain_tokens is None:
        return None
    if question.pretrain_tokens is None:
        raise InputError("--alpha is a part of the pre-training", hint="--pretrain-tokens says how long that was")
    if weights is None or not weights.parameters:
        notes.append("no cost of uptraining: the number of parameters is not known from this source")
        return None
    alpha = 0.05 if question.alpha is None else question.alpha
    return uptraining_cost(weights.parameters, alpha, question.pretrain_tokens, question.gpu)
