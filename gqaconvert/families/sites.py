"""The attention modules of a checkpoint, found by name and checked by shape. No tensor data is read."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gqaconvert.checkpoint.headers import TensorEntry, Transposed
from gqaconvert.errors import CheckpointError, HeadCountError, UnsupportedFormatError, UnsupportedModelError
from gqaconvert.families.config import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, ModelConfig
from gqaconvert.families.family import KV_HEADS as COUNT
from gqaconvert.families.family import Count, Default, Family, Form, Layout, Part
from gqaconvert.families.shipped import shipped_keys, stock_class

# Buffers that old checkpoints carry inside attention modules.
_BUFFERS = frozenset(("rotary_emb.inv_freq", "bias", "masked_bias"))
_TOWERS = re.compile(r"(^|\.)[^.]*(vision|visual|audio|encoder|vit|resampler|qformer)[^.]*\.")
_QUANTISED = frozenset(
    (
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
        "weight_scale",
        "weight_scale_inv",
        "weight_packed",
        "absmax",
        "quant_map",
        "SCB",
    )
)


@dataclass(frozen=True)
class AttentionGeometry:
    """Heads of one attention module.

    Attributes:
        num_attention_heads: query heads, H.
        num_key_value_heads: KV heads, G.
        head_dim: width of a query and key head, D.
        value_head_dim: width of a value head.
    """

    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    value_head_dim: int

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one KV head, H / G."""
        return self.num_attention_heads // self.num_key_value_heads

    def with_kv_heads(self, count: int) -> "AttentionGeometry":
        """The same heads with another number of KV heads."""
        return AttentionGeometry(self.num_attention_heads, count, self.head_dim, self.value_head_dim)


class SiteTensor(NamedTuple):
    """One tensor of an attention module: its role, and for norms in a list its number there."""

    entry: TensorEntry
    name: str
    part: Part
    leaf: str
    number: int = 0


@dataclass(frozen=True)
class AttentionSite:
    """One attention module. ``prefix`` ends with the module's name and a dot.

    Attributes:
        cross: whether its keys and values come from an encoder; they are cached once, not token by token.
    """

    prefix: str
    layer: int
    tensors: tuple[SiteTensor, ...]
    geometry: AttentionGeometry
    cross: bool = False

    def find(self, part: Part, leaf: str = "weight") -> TensorEntry | None:
        """The tensor with this role, None if there is none."""
        return next((t.entry for t in self.tensors if t.part is part and t.leaf == leaf), None)


class _Module(NamedTuple):
    """Where an attention module is: ``stack`` ends with a dot."""

    stack: str
    layer: int
    attention: str

    @property
    def prefix(self) -> str:
        return f"{self.stack}{self.layer}.{self.attention}."


_REWRITTEN = frozenset((Part.QUERY, Part.KEY, Part.VALUE, Part.QKV))


def rewritten(site: AttentionSite) -> list[tuple[Part, str, TensorEntry]]:
    """The tensors that a merge of the whole site writes anew: (part, leaf, entry); of OUTPUT the weight only."""
    return [
        (tensor.part, tensor.leaf, tensor.entry)
        for tensor in site.tensors
        if tensor.part in _REWRITTEN or (tensor.part is Part.OUTPUT and tensor.leaf == "weight")
    ]


def find_sites(entries: Mapping[str, TensorEntry], family: Family, config: ModelConfig) -> tuple[AttentionSite, ...]:
    """All attention modules of the text decoder, in the order of the layers, with one geometry.

    Raises:
        CheckpointError: modules are missing or incomplete, or config and shapes contradict each other.
        UnsupportedFormatError: names show a quantised, wrapped or foreign dump.
        UnsupportedModelError: names inside the attention that the family does not declare, or two decoders.
    """
    refuse_foreign_names(entries)
    heads = config.count(family.heads) or family.assumed_heads
    if heads is None:
        raise CheckpointError(f"config.json has no number of attention heads ({', '.join(family.heads[:2])})")
    hidden = config.count(HIDDEN) if family.conv1d else None
    modules = "|".join(map(re.escape, family.attentions))
    pattern = re.compile(rf"(.*?(?:^|\.){re.escape(family.stack)}\.)(\d+)\.({modules})\.(.+)", re.DOTALL)
    found: dict[_Module, list[SiteTensor]] = {}
    for name, entry in entries.items():
        # Cheap tests first: most names of a large model are no attention.
        if not any(attention in name for attention in family.attentions) or (match := pattern.fullmatch(name)) is None:
            continue
        if (
            not _TOWERS.search(match[1].removesuffix(f"{family.stack}."))
            and (tensor := _site_tensor(entry, match[4], family, hidden)) is not None
        ):
            found.setdefault(_Module(match[1], int(match[2]), match[3]), []).append(tensor)
    _check_stack(found, family, config)
    sites = [
        AttentionSite(
            module.prefix, module.layer, tuple(tensors), _geometry(module.prefix, tensors, heads, config),
            module.attention == family.cross_attention,
        )
        for module, tensors in found.items()
    ]  # fmt: skip
    sites.sort(key=lambda site: (site.layer, site.cross))
    for site in sites:
        if site.geometry != sites[0].geometry:
            raise UnsupportedModelError(
                f"layers differ in their heads: {sites[0].prefix}: {sites[0].geometry}, {site.prefix}: {site.geometry}"
            )
    _check_config(sites[0].geometry, family, config)
    return tuple(sites)


def refuse_foreign_names(names: Iterable[str]) -> None:
    """Refuse dumps whose names show that no stock loader would read them, or that their weights are packed.

    Raises:
        UnsupportedFormatError: with the tool that mends it.
    """
    for name in names:
        if name.rpartition(".")[2] in _QUANTISED:
            raise UnsupportedFormatError(
                f"the weights are quantised (tensor {name!r})",
                hint="convert the original weights, then quantise the result",
            )
        if name.startswith("base_model.model."):
            raise UnsupportedFormatError(
                f"a dump of a PEFT-wrapped model (tensor {name!r})",
                hint="save model.merge_and_unload() instead",
            )
        if "_orig_mod." in name:
            raise UnsupportedFormatError(
                f"a dump of a torch.compile wrapper (tensor {name!r})", hint="save model._orig_mod instead"
            )
        if name.endswith("attention.wq.weight") and name.startswith("layers."):
            raise UnsupportedFormatError(
                f"Meta's own tensor names ({name!r})",
                hint="take the Hugging Face version: its rotary rows are permuted",
            )


def _site_tensor(entry: TensorEntry, inner: str, family: Family, hidden: int | None) -> SiteTensor | None:
    """The role of a tensor by its name inside the attention module, None for what is never touched."""
    if inner in _BUFFERS:
        return None
    name, _, leaf = inner.partition(".")
    part = family.parts.get(name)
    if part is Part.UNTOUCHED:
        return None
    number = 0
    if part is Part.KEY_NORM_LIST and (match := re.fullmatch(r"norms\.(\d{1,5})\.(weight|bias)", leaf)):
        number, leaf = int(match[1]), match[2]
    if part is None or leaf not in ("weight", "bias"):
        raise UnsupportedModelError(
            f"tensor {entry.name!r} is not part of the attention of family {family.name!r}",
            hint="its layout is not known here, so converting it could scramble heads",
        )
    if 0 in entry.shape:
        raise UnsupportedFormatError(
            f"tensor {entry.name!r} is empty: a placeholder of DeepSpeed ZeRO-3",
            hint="gather the weights first: python zero_to_fp32.py . OUT --safe_serialization",
        )
    # A modelling file of ours holds the fused projection the usual way round, and then its first size is another.
    if name in family.conv1d and leaf == "weight" and len(entry.shape) == 2 and entry.shape[0] == hidden:
        entry = Transposed.of(entry)
    return SiteTensor(entry, name, part, leaf, number)


def _check_stack(found: Iterable[_Module], family: Family, config: ModelConfig) -> None:
    modules = list(found)
    if not modules:
        raise CheckpointError(
            f"no tensor is named like the attention of family {family.name!r} ({family.stack}.N.{family.attention}.*)",
            hint="--family NAME chooses another layout",
        )
    if len(stacks := {module.stack for module in modules}) > 1:
        raise UnsupportedModelError(f"several decoders in one checkpoint: {', '.join(sorted(stacks))}")
    by_attention = [{module.layer for module in modules if module.attention == path} for path in family.attentions]
    # A layer with both kinds of attention means that all have both; otherwise the kinds share the layers among them.
    both = len(by_attention) > 1 and bool(by_attention[0] & by_attention[1])
    expected = _attention_layers(config, config.count(family.layers))
    for numbers in by_attention if both else [set.union(*by_attention)]:
        if expected is not None and numbers != expected:
            lost = sorted(expected - numbers)[:5]
            raise CheckpointError(
                f"config.json says {len(expected)} layers, {len(numbers)} have attention tensors"
                + (f"; missing: layer {', '.join(map(str, lost))}" if lost else "")
            )


def _attention_layers(config: ModelConfig, count: int | None) -> set[int] | None:
    """The numbers of the layers with softmax attention, all but in hybrids; None where the config does not say."""
    kinds = config.text.get("layer_types")
    if isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds):
        return {layer for layer, kind in enumerate(kinds) if kind.endswith("attention") and "linear" not in kind}
    if count is None:
        return None
    if (interval := config.count(("full_attention_interval",))) is not None:
        return {layer for layer in range(count) if (layer + 1) % interval == 0}
    if (period := config.count(("attn_layer_period",))) is not None:
        offset = config.text.get("attn_layer_offset", 4)
        return {layer for layer in range(count) if layer % period == offset}
    return set(range(count))


def _geometry(prefix: str, tensors: list[SiteTensor], heads: int, config: ModelConfig) -> AttentionGeometry:
    shapes = {(tensor.part, tensor.leaf): tensor.entry.shape for tensor in tensors}
    gated = (Part.QUERY_GATED, "weight") in shapes
    query = Part.QUERY_GATED if gated else Part.QUERY
    needed = (Part.QKV,) if (Part.QKV, "weight") in shapes else (query, Part.KEY, Part.VALUE)
    for part in (*needed, Part.OUTPUT):
        if len(shapes.get((part, "weight"), ())) != 2:
            raise CheckpointError(f"{prefix}: the {part.value} projection's weight is missing or no matrix")
    output_columns = shapes[Part.OUTPUT, "weight"][1]
    value_dim = output_columns // heads
    rows = {part: shapes[part, "weight"][0] for part in needed}
    if Part.QKV in rows:
        # Fused families have one width for all heads.
        head_dim = value_dim
        kv_heads = (rows[Part.QKV] // max(head_dim, 1) - heads) // 2
        fits = head_dim > 0 and kv_heads > 0 and rows[Part.QKV] == (heads + 2 * kv_heads) * head_dim
    else:
        head_dim = rows[query] // heads // (2 if gated else 1)
        kv_heads = rows[Part.KEY] // max(head_dim, 1)
        fits = (
            head_dim > 0 and kv_heads > 0 and rows[query] == heads * head_dim * (2 if gated else 1)
            and rows[Part.KEY] == kv_heads * head_dim and rows[Part.VALUE] == kv_heads * value_dim
        )  # fmt: skip
    named = {part.value: list(shapes[part, "weight"]) for part in (*needed, Part.OUTPUT)}
    if not fits or output_columns != heads * value_dim or heads % kv_heads:
        said = f"{heads} query heads (config.json)"
        if config.count(HEADS) is None:
            said = f"{heads} query heads (config.json has no {HEADS[0]}, and its class assumes so many)"
        raise CheckpointError(f"{prefix}: {said} do not fit the shapes {named}")
    explicit = config.count(HEAD_DIM)
    if explicit is not None and explicit != head_dim:
        raise CheckpointError(f"{prefix}: config.json says head_dim {explicit}, the shapes {named} say {head_dim}")
    geometry = AttentionGeometry(heads, kv_heads, head_dim, value_dim)
    _check_small_tensors(tensors, rows, geometry)
    return geometry


def _check_small_tensors(tensors: list[SiteTensor], rows: Mapping[Part, int], geometry: AttentionGeometry) -> None:
    """Biases have their projection's rows, norms the width that their role says."""
    kv_heads, head_dim = geometry.num_key_value_heads, geometry.head_dim
    numbers: dict[str, list[int]] = {}
    for entry, _, part, leaf, number in tensors:
        sound = True
        if part in rows and leaf == "bias":
            sound = entry.shape == (rows[part],)
        elif part is Part.KEY_NORM:
            sound = entry.shape in ((kv_heads * head_dim,), (kv_heads, head_dim))
        elif part in (Part.KEY_NORM_LIST, Part.KEY_NORM_SHARED):
            sound = entry.shape == (head_dim,)
        if part is Part.KEY_NORM_LIST:
            numbers.setdefault(leaf, []).append(number)
        if not sound:
            raise CheckpointError(f"{entry.name}: shape {list(entry.shape)} does not fit {geometry}")
    for found in numbers.values():
        if sorted(found) != list(range(kv_heads)):
            raise CheckpointError(f"{tensors[0].entry.name}: {len(found)} key norms beside it for {kv_heads} KV heads")


def _check_config(geometry: AttentionGeometry, family: Family, config: ModelConfig) -> None:
    """The config's KV-head count, where the family reads one, must be that of the weights."""
    form = next((form for form in family.forms if _count_name(geometry) in form.counts), None)
    if form is None or COUNT not in form.config.values():
        return
    declared = config.count(tuple(key for key, value in form.config.items() if value is COUNT) or KV_HEADS)
    if declared is not None and declared != geometry.num_key_value_heads:
        raise CheckpointError(
            f"config.json says {declared} KV heads, the weights have {geometry.num_key_value_heads}",
            hint="one of the two is wrong; no loader would accept this checkpoint",
        )


def _count_name(geometry: AttentionGeometry) -> Count:
    if geometry.num_key_value_heads == geometry.num_attention_heads:
        return "all"
    return "one" if geometry.num_key_value_heads == 1 else "some"


def legal_kv_heads(family: Family, config: ModelConfig, geometry: AttentionGeometry) -> tuple[int, ...]:
    """The KV-head counts that can be written, ascending, the present one among them."""
    heads, present = geometry.num_attention_heads, geometry.num_key_value_heads
    return tuple(
        count
        for count in range(1, heads + 1)
        if heads % count == 0
        and (present % count == 0 or count % present == 0)
        and (count == present or _form(family, config, geometry.with_kv_heads(count)) is not None)
    )


def form_for(family: Family, config: ModelConfig, geometry: AttentionGeometry, kv_heads: int) -> Form:
    """How to write a checkpoint with this many KV heads.

    Raises:
        UnsupportedModelError: the family cannot be converted at all.
        HeadCountError: the count is not legal; the message names those that are.
    """
    if family.refusal:
        raise UnsupportedModelError(f"{config.model_type or family.name}: {family.refusal}")
    if family.wasteful and not family.forms:
        raise UnsupportedModelError(
            f"{config.model_type}: {family.wasteful}",
            hint="--expanded writes merged heads repeated, which saves nothing",
        )
    legal = legal_kv_heads(family, config, geometry)
    form = _form(family, config, geometry.with_kv_heads(kv_heads)) if kv_heads in legal else None
    if form is None or kv_heads == geometry.num_key_value_heads:
        others = ", ".join(str(count) for count in legal if count != geometry.num_key_value_heads) or "none"
        present, heads = geometry.num_key_value_heads, geometry.num_attention_heads
        problem = f"not possible from {present} KV heads for {heads} query heads"
        if kv_heads == present:
            problem = "the checkpoint already has that many"
        raise HeadCountError(f"{kv_heads} KV heads: {problem}", hint=f"possible counts: {others}")
    return form


def expanded_form(family: Family, config: ModelConfig, geometry: AttentionGeometry, kv_heads: int) -> Form:
    """How to write all heads, ``kv_heads`` different ones among the KV heads, for the stock class.

    Raises:
        UnsupportedModelError: the family is refused, or holds fewer heads by a modelling file of ours.
        HeadCountError: the count is not legal.
    """
    if family.refusal:
        raise UnsupportedModelError(f"{config.model_type or family.name}: {family.refusal}")
    heads, present = geometry.num_attention_heads, geometry.num_key_value_heads
    legal = [count for count in range(1, present) if present % count == 0]
    if kv_heads not in legal:
        raise HeadCountError(
            f"{kv_heads} different KV heads: not possible from {present}",
            hint=f"possible counts: {', '.join(map(str, legal)) or 'none'}",
        )
    form = Form(config={}) if present == heads else _form(family, config, geometry.with_kv_heads(heads))
    if form is None:
        raise UnsupportedModelError(
            f"the stock class of {config.model_type} has no form for the {heads} KV heads to be written",
            hint="convert the original checkpoint with --expanded",
        )
    return form


def _form(family: Family, config: ModelConfig, target: AttentionGeometry) -> Form | None:
    name = _count_name(target)
    for form in family.forms:
        if name in form.counts and config.matches(form.requires, family.defaults):
            return form
    return None


def config_changes(family: Family, form: Form, config: ModelConfig, kv_heads: int) -> dict[str, Any]:
    """The keys of config.json to set, and their values.

    Raises:
        UnsupportedModelError: the form has no class that stands for this model's, stock or ours.
    """
    changes: dict[str, Any] = {}
    for key, value in form.config.items():
        if not isinstance(value, Default):
            outer, _, inner = key.partition(".")
            stands = kv_heads if value is COUNT else value
            changes[outer] = {**(config.value(outer) or {}), inner: stands} if inner else stands
        elif key not in config.text:
            changes[key] = value.value
    if form.classes:
        stock = stock_class(config.raw) or next(iter(form.classes))
        if stock not in form.classes:
            raise UnsupportedModelError(f"{changes['model_type']} has no counterpart of the class {stock}")
        changes["architectures"] = [form.classes[stock]]
    return changes | (shipped_keys(family, config) if form.shipped else {})


def turns(form: Form | None, name: str, part: Part | None) -> bool:
    """Whether a form stores (out, in) what the source stores (in, out)."""
    if form is None:
        return False
    if part in (Part.QUERY, Part.KEY, Part.VALUE, Part.QKV):
        return form.shipped or form.linear is not None
    return bool(form.linear and re.search(form.linear, name))


def output_layout(family: Family, form: Form) -> Layout:
    """The layout of the projections in the output."""
    return form.layout or family.layout
