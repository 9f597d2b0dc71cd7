"""The attention modules of a checkpoint, found by name and checked by shape. No tensor data is read."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gqaconvert.checkpoint.headers import TensorEntry
from gqaconvert.errors import CheckpointError, HeadCountError, UnsupportedFormatError, UnsupportedModelError
from gqaconvert.families.config import HEAD_DIM, HEADS, KV_HEADS, LAYERS, ModelConfig
from gqaconvert.families.family import KV_HEADS as COUNT
from gqaconvert.families.family import Count, Family, Form, Layout, Part

# Buffers that old checkpoints carry inside attention modules.
_BUFFERS = frozenset(("rotary_emb.inv_freq", "bias", "masked_bias"))
_TOWERS = re.compile(r"(^|\.)[^.]*(vision|visual|audio|encoder|vit)[^.]*\.")
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
    """One attention module. ``prefix`` ends with the module's name and a dot."""

    prefix: str
    layer: int
    tensors: tuple[SiteTensor, ...]
    geometry: AttentionGeometry

    def find(self, part: Part, leaf: str = "weight") -> TensorEntry | None:
        """The tensor with this role, None if there is none."""
        return next((t.entry for t in self.tensors if t.part is part and t.leaf == leaf), None)


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
    heads = config.count(HEADS)
    if heads is None:
        raise CheckpointError(f"config.json has no number of attention heads ({', '.join(HEADS[:2])})")
    pattern = re.compile(
        rf"(.*?(?:^|\.){re.escape(family.stack)}\.(\d+)\.{re.escape(family.attention)}\.)(.+)", re.DOTALL
    )
    found: dict[str, list[SiteTensor]] = {}
    layers: dict[str, int] = {}
    for name, entry in entries.items():
        # Two cheap tests first: most names of a large model are no attention.
        if family.attention not in name or (match := pattern.fullmatch(name)) is None or _TOWERS.search(match[1]):
            continue
        tensor = _site_tensor(entry, match[3], family)
        if tensor is not None:
            layers[match[1]] = int(match[2])
            found.setdefault(match[1], []).append(tensor)
    _check_stack(found, layers, family, config)
    sites = [
        AttentionSite(prefix, layers[prefix], tuple(tensors), _geometry(prefix, tensors, heads, config))
        for prefix, tensors in found.items()
    ]
    sites.sort(key=lambda site: site.layer)
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


def _site_tensor(entry: TensorEntry, inner: str, family: Family) -> SiteTensor | None:
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
    return SiteTensor(entry, name, part, leaf, number)


def _check_stack(
    found: Mapping[str, list[SiteTensor]], layers: Mapping[str, int], family: Family, config: ModelConfig
) -> None:
    if not found:
        raise CheckpointError(
            f"no tensor is named like the attention of family {family.name!r} ({family.stack}.N.{family.attention}.*)",
            hint="--family NAME chooses another layout",
        )
    stacks = {prefix[: prefix.rindex(f"{family.stack}.")] for prefix in found}
    if len(stacks) > 1:
        raise UnsupportedModelError(f"several decoders in one checkpoint: {', '.join(sorted(stacks))}")
    expected = config.count(LAYERS)
    numbers = sorted(layers.values())
    if expected is not None and numbers != list(range(expected)):
        lost = sorted(set(range(expected)) - set(numbers))[:5]
        raise CheckpointError(
            f"config.json says {expected} layers, {len(numbers)} have attention tensors"
            + (f"; missing: layer {', '.join(map(str, lost))}" if lost else "")
        )


def _geometry(prefix: str, tensors: list[SiteTensor], heads: int, config: ModelConfig) -> AttentionGeometry:
    shapes = {(tensor.part, tensor.leaf): tensor.entry.shape for tensor in tensors}
    needed = (Part.QKV,) if (Part.QKV, "weight") in shapes else (Part.QUERY, Part.KEY, Part.VALUE)
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
        head_dim = rows[Part.QUERY] // heads
        kv_heads = rows[Part.KEY] // max(head_dim, 1)
        fits = (
            head_dim > 0 and kv_heads > 0 and rows[Part.QUERY] == heads * head_dim
            and rows[Part.KEY] == kv_heads * head_dim and rows[Part.VALUE] == kv_heads * value_dim
        )  # fmt: skip
    named = {part.value: list(shapes[part, "weight"]) for part in (*needed, Part.OUTPUT)}
    if not fits or output_columns != heads * value_dim or heads % kv_heads:
        raise CheckpointError(f"{prefix}: {heads} query heads (config.json) do not fit the shapes {named}")
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


def _form(family: Family, config: ModelConfig, target: AttentionGeometry) -> Form | None:
    name = _count_name(target)
    for form in family.forms:
        if name in form.counts and config.matches(form.requires, family.defaults):
            return form
    return None


def output_layout(family: Family, form: Form) -> Layout:
    """The layout of the projections in the output."""
    return form.layout or family.layout
