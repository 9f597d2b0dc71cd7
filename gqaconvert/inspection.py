"""What a checkpoint is: architecture, heads, sizes, problems, possible conversions. Headers and JSON only."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from gqaconvert.checkpoint import dtypes
from gqaconvert.checkpoint.files import CheckpointFiles
from gqaconvert.checkpoint.index import CheckpointIndex, Problem, read_index, read_json
from gqaconvert.checkpoint.source import open_source
from gqaconvert.errors import CheckpointError, GqaConvertError, UnsupportedFormatError
from gqaconvert.families import Family, Part, family_of, get_family
from gqaconvert.families.config import LAYERS, ModelConfig
from gqaconvert.families.sites import AttentionGeometry, AttentionSite, find_sites, legal_kv_heads
from gqaconvert.sidecars import CONFIG, PROVENANCE

SCHEMA = "gqaconvert.inspect/1"
_TENSOR_PARALLEL = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint read from headers and JSON: what is needed to describe it and to plan a conversion.

    Attributes:
        index: all tensors.
        config: config.json.
        family: its family, None if none fits.
        sites: its attention modules, empty if they could not be made out.
        obstacle: why there is no family or no sites.
    """

    index: CheckpointIndex
    config: ModelConfig
    family: Family | None
    sites: tuple[AttentionSite, ...]
    obstacle: GqaConvertError | None

    @property
    def files(self) -> CheckpointFiles:
        """Where it was read from."""
        return self.index.files

    @property
    def self_attentions(self) -> int:
        """Layers whose cache grows with every token; those that read an encoder's states are not counted."""
        return sum(not site.cross for site in self.sites)

    @property
    def inner_names(self) -> frozenset[str]:
        """First components of the tensors' names inside the first attention module."""
        if not self.sites:
            return frozenset()
        prefix = self.sites[0].prefix
        return frozenset(name[len(prefix) :].split(".")[0] for name in self.index.entries if name.startswith(prefix))

    def require_family(self) -> Family:
        """The family, or the error that says why there is none."""
        if self.family is None:
            raise self.obstacle or CheckpointError("no model family")
        return self.family

    def require_sound(self) -> None:
        """Refuse files that contradict each other.

        Raises:
            CheckpointError: the first problem that forbids working with them.
        """
        for problem in self.index.problems:
            if problem.severity == "error":
                raise CheckpointError(
                    f"{problem.subject}: {problem.message}", hint="'gqaconvert inspect' lists all problems"
                )

    def require_sites(self) -> tuple[AttentionSite, ...]:
        """The attention modules of a sound checkpoint.

        Raises:
            GqaConvertError: why there are none, or the first problem that forbids working with the files.
        """
        family = self.require_family()
        self.require_sound()
        if family.refusal is None and self.obstacle is not None:
            raise self.obstacle
        if not self.sites:
            raise self.obstacle or CheckpointError("no attention modules")
        return self.sites


def read_checkpoint(files: CheckpointFiles, *, family: str | None = None) -> Checkpoint:
    """Read headers and config.json, and find the family and its attention modules.

    Raises:
        CheckpointError: no readable shard, no readable config.json.
        InputError: ``family`` names no family.
    """
    chosen = get_family(family) if family else None
    config = ModelConfig.of(read_json(files, CONFIG))
    index = read_index(files)
    obstacle: GqaConvertError | None = None
    sites: tuple[AttentionSite, ...] = ()
    try:
        chosen = chosen or family_of(config)
        _refuse_quantised(config)
        sites = find_sites(index.entries, chosen, config)
    except GqaConvertError as error:
        obstacle = error
    return Checkpoint(index, config, chosen, sites, obstacle)


def _refuse_quantised(config: ModelConfig) -> None:
    """Refuse quantised weights, unless the config says that the attention was left alone (gpt_oss does)."""
    quantisation = config.raw.get("quantization_config") or config.text.get("quantization_config")
    if not quantisation:
        return
    spared = quantisation.get("modules_to_not_convert") if isinstance(quantisation, dict) else None
    if not isinstance(spared, list) or not any("self_attn" in str(name) for name in spared):
        method = (
            quantisation.get("quant_method", "unknown method") if isinstance(quantisation, dict) else "unknown method"
        )
        raise UnsupportedFormatError(
            f"the weights are quantised (config.json: quantization_config, {str(method)[:80]})",
            hint="convert the original weights, then quantise the result",
        )


@dataclass(frozen=True)
class KvHeadOption:
    """One KV-head count: what the cache costs then, and which tensor-parallel sizes suit it.

    Attributes:
        num_key_value_heads: the count.
        queries_per_kv: query heads a KV head.
        cache_bytes_per_token: K and V of all layers, in the checkpoint's type; windows and policies not counted.
        tensor_parallel: sizes that split query and KV heads evenly.
        tensor_parallel_replicated: sizes at which KV heads are repeated on several devices.
        current: whether the checkpoint has this count now.
    """

    num_key_value_heads: int
    queries_per_kv: int
    cache_bytes_per_token: int
    tensor_parallel: tuple[int, ...]
    tensor_parallel_replicated: tuple[int, ...]
    current: bool


@dataclass(frozen=True)
class Inspection:
    """What `gqaconvert inspect` shows. Sizes in bytes; see the README for the JSON schema."""

    source: str
    revision: str | None
    model_type: str
    family: str | None
    attention: str
    num_hidden_layers: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None
    value_head_dim: int | None
    projections: tuple[str, ...]
    layout: str | None
    biases: tuple[str, ...]
    norms: tuple[str, ...]
    position: str | None
    rotary_fraction: float | None
    sliding_window: int | None
    tied_embeddings: bool
    parameters: int
    total_bytes: int
    dtypes: Mapping[str, int]
    shards: Mapping[str, int]
    kv_heads: tuple[KvHeadOption, ...]
    convertible: bool
    reason: str | None
    caution: str | None
    problems: tuple[Problem, ...]
    provenance: Mapping[str, Any] | None

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            "schema": SCHEMA,
            **asdict(self),
            "problems": [problem._asdict() for problem in self.problems],
        }


def inspect_checkpoint(
    source: str, *, revision: str | None = None, offline: bool = False, family: str | None = None
) -> Inspection:
    """Describe a checkpoint. For a Hub id only JSON files and headers travel.

    Raises:
        GqaConvertError: nothing could be made of the source at all.
    """
    return describe(read_checkpoint(open_source(source, revision=revision, offline=offline), family=family))


def describe(checkpoint: Checkpoint) -> Inspection:
    """The facts of a checkpoint, in a form to show."""
    config, index, family = checkpoint.config, checkpoint.index, checkpoint.family
    site = checkpoint.sites[0] if checkpoint.sites else None
    geometry = site.geometry if site else None
    window = config.text.get("sliding_window")
    inner_names = checkpoint.inner_names
    reason = _reason(checkpoint)
    by_dtype: dict[str, int] = {}
    for entry in index.entries.values():
        by_dtype[entry.dtype] = by_dtype.get(entry.dtype, 0) + entry.nbytes
    return Inspection(
        source=checkpoint.files.label,
        revision=checkpoint.files.revision,
        model_type=config.model_type,
        family=family.name if family else None,
        attention=_attention_kind(config, geometry),
        num_hidden_layers=len({site.layer for site in checkpoint.sites}) or _lenient_layers(config),
        num_attention_heads=geometry.num_attention_heads if geometry else None,
        num_key_value_heads=geometry.num_key_value_heads if geometry else None,
        head_dim=geometry.head_dim if geometry else None,
        value_head_dim=geometry.value_head_dim if geometry else None,
        projections=_names(site, Part.QUERY, Part.KEY, Part.VALUE, Part.QKV, Part.OUTPUT),
        layout=family.layout.value if family and site else None,
        biases=tuple(t.name for t in site.tensors if t.leaf == "bias" and "norm" not in t.part.value) if site else (),
        norms=tuple(name for name in family.parts if name in inner_names and "norm" in name) if family else (),
        position=family.position.value if family and site else None,
        rotary_fraction=family.rotary_part(config, geometry.head_dim) if family and geometry else None,
        sliding_window=window if isinstance(window, int) and not isinstance(window, bool) else None,
        tied_embeddings=bool(config.raw.get("tie_word_embeddings", config.text.get("tie_word_embeddings", False))),
        parameters=sum(entry.numel for entry in index.entries.values()),
        total_bytes=index.total_size,
        dtypes=by_dtype,
        shards={shard.shard: shard.data_start + shard.data_bytes for shard in index.shards},
        kv_heads=_options(checkpoint, geometry) if family and geometry else (),
        convertible=reason is None,
        reason=reason,
        caution=family.caution_for(config.text) if family else None,
        problems=_problems(checkpoint),
        provenance=read_provenance(checkpoint.files),
    )


def _reason(checkpoint: Checkpoint) -> str | None:
    """Why it cannot be converted, None if it can."""
    family = checkpoint.family
    if family and (family.refusal or (family.wasteful and not family.forms)):
        return family.refusal or family.wasteful
    try:
        checkpoint.require_sites()
    except GqaConvertError as error:
        return error.message
    return None


def _lenient_layers(config: ModelConfig) -> int | None:
    try:
        return config.count(LAYERS)
    except CheckpointError:
        return None


def _attention_kind(config: ModelConfig, geometry: AttentionGeometry | None) -> str:
    if config.text.get("kv_lora_rank"):
        return "MLA"
    kinds = config.text.get("layer_types")
    if isinstance(kinds, list) and any(not str(kind).endswith("attention") or "linear" in str(kind) for kind in kinds):
        return "hybrid"
    if geometry is None:
        return "unknown"
    if geometry.num_key_value_heads == geometry.num_attention_heads:
        return "MHA"
    return "MQA" if geometry.num_key_value_heads == 1 else "GQA"


def _names(site: AttentionSite | None, *parts: Part) -> tuple[str, ...]:
    found = {tensor.part: tensor.name for tensor in site.tensors} if site else {}
    return tuple(found[part] for part in parts if part in found)


def _options(checkpoint: Checkpoint, geometry: AttentionGeometry) -> tuple[KvHeadOption, ...]:
    family, config = checkpoint.require_family(), checkpoint.config
    entry = checkpoint.sites[0].find(Part.KEY) or checkpoint.sites[0].find(Part.QKV)
    assert entry is not None
    width = geometry.head_dim + geometry.value_head_dim
    heads = geometry.num_attention_heads
    options = []
    for count in legal_kv_heads(family, config, geometry):
        sizes = [size for size in _TENSOR_PARALLEL if heads % size == 0]
        options.append(
            KvHeadOption(
                num_key_value_heads=count,
                queries_per_kv=heads // count,
                cache_bytes_per_token=dtypes.nbytes(entry.dtype, checkpoint.self_attentions * count * width),
                tensor_parallel=tuple(size for size in sizes if count % size == 0),
                tensor_parallel_replicated=tuple(size for size in sizes if size > count and size % count == 0),
                current=count == geometry.num_key_value_heads,
            )
        )
    return tuple(options)


def _problems(checkpoint: Checkpoint) -> tuple[Problem, ...]:
    problems = list(checkpoint.index.problems)
    # Damaged files explain an incomplete attention: one fault, one problem.
    obstacle = None if any(problem.severity == "error" for problem in problems) else checkpoint.obstacle
    if obstacle is not None and checkpoint.family is not None and checkpoint.family.refusal is None:
        problems.append(Problem("error", "attention", CONFIG, obstacle.message))
    if "adapter_config.json" in checkpoint.files.sizes:
        message = "beside full weights: loaders may take the folder for an adapter; not carried over"
        problems.append(Problem("warning", "adapter-config", "adapter_config.json", message))
    empty = [name for name, entry in checkpoint.index.entries.items() if 0 in entry.shape]
    if empty:
        problems.append(
            Problem(
                "warning",
                "empty-tensor",
                empty[0],
                f"no elements; {len(empty)} such tensors (ZeRO-3 placeholders?)",
            )
        )
    return tuple(problems)


def read_provenance(files: CheckpointFiles) -> Mapping[str, Any] | None:
    """The record that an earlier conversion left, None if there is none or it is no record."""
    if PROVENANCE not in files.sizes:
        return None
    try:
        return read_json(files, PROVENANCE)
    except CheckpointError:
        return None


def with_problems(inspection: Inspection, problems: tuple[Problem, ...]) -> Inspection:
    """The same description with further problems, e.g. those of the weights' values."""
    return replace(inspection, problems=inspection.problems + problems)
