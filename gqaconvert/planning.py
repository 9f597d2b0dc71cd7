"""What a conversion will do, decided from headers alone: every output tensor as a recipe of source bytes.

The uniform view behind it: along the output axis, every tensor that belongs to K or V is a row of head blocks, each
contiguous in the file. A separate k_proj is [key 0, key 1, ...]; a fused tensor is query, key and value blocks in the
layout's order; a key norm that spans the KV heads is key blocks with one element a row. An output tensor lists its own
blocks in the target's layout; query blocks are copied, a key or value block is pooled from (or, when the count grows,
copied from) its group's blocks in the source.

Methods that rewrite a whole attention site (subspace, align) put its tensors into a work file first; the plan fixes
where each lies in it, and from there on they are bytes to copy like all others.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from gqaconvert import __version__
from gqaconvert.checkpoint import dtypes
from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.headers import TensorEntry, Transposed, build_header
from gqaconvert.checkpoint.index import INDEX_FILE, SINGLE_FILE, CheckpointIndex
from gqaconvert.errors import InputError, UnsupportedFormatError, UnsupportedModelError
from gqaconvert.families import Family, Form, Layout, Part
from gqaconvert.families.blocks import head_blocks, source_heads
from gqaconvert.families.shipped import FILE, modelling_source
from gqaconvert.families.sites import (
    AttentionGeometry,
    AttentionSite,
    SiteTensor,
    config_changes,
    expanded_form,
    form_for,
    output_layout,
    rewritten,
    turns,
)
from gqaconvert.inspection import Checkpoint
from gqaconvert.merge import SITE_METHODS, check_method
from gqaconvert.merge.freedom import Freedom, freedom_of
from gqaconvert.merge.pooling import Role
from gqaconvert.sidecars import Sidecars, plan_sidecars


@dataclass(frozen=True)
class CalibrationText:
    """Text to calibrate on, known by its content: ``name`` as the user gave it, ``tokens`` at most."""

    name: str
    sha256: str
    tokens: int


@dataclass(frozen=True)
class Recipe:
    """What the user asked for, as far as it decides the output's bytes.

    Attributes:
        num_key_value_heads: KV heads of the output.
        method: name of a pooling method, or of a site method.
        seed: for methods that draw, and for the order of calibration batches.
        dtype: safetensors name of the output's floating type, None to keep each tensor's own.
        max_shard_size: bytes, None to keep the source's sharding.
        family: name given by the user, None to find it.
        grouping: "adjacent", or "similar" to reorder heads by how well they merge.
        calibration: text that site methods are fitted on, None for weights only.
        refine: optimiser steps a layer, "auto", or None.
        joint: steps on all layers together after that, None for none.
        expanded: write each merged head as often as it is read, for a class that has no setting for fewer.
    """

    num_key_value_heads: int
    method: str = "mean"
    seed: int = 0
    dtype: str | None = None
    max_shard_size: int | None = None
    family: str | None = None
    grouping: str = "adjacent"
    calibration: CalibrationText | None = None
    refine: int | str | None = None
    joint: int | None = None
    expanded: bool = False


class ByteRange(NamedTuple):
    """Bytes of a source shard; ``start`` counts from the beginning of the file."""

    shard: str
    start: int
    nbytes: int


class ColumnRange(NamedTuple):
    """Columns of a stored matrix, read as rows: ``columns`` from ``first`` on of (height, width) elements.

    ``start`` is the matrix's place in the file, in bytes; ``itemsize`` in bytes.
    """

    shard: str
    start: int
    height: int
    width: int
    first: int
    columns: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Size of these columns."""
        return self.height * self.columns * self.itemsize


Place = ByteRange | ColumnRange


class CopyPiece(NamedTuple):
    """Bytes that go into the output as they are."""

    source: ByteRange


class CastPiece(NamedTuple):
    """Elements that go into the output in another floating type, or turned from columns to rows."""

    source: Place
    source_dtype: str
    name: str

    @property
    def numel(self) -> int:
        """Elements."""
        return self.source.nbytes * 8 // dtypes.BITS[self.source_dtype]


class PoolPiece(NamedTuple):
    """One head of the output: ``sources`` are the group's heads, each (rows, row_size) elements of ``source_dtype``."""

    sources: tuple[Place, ...]
    source_dtype: str
    rows: int
    row_size: int
    role: Role
    key: str

    @property
    def numel(self) -> int:
        """Elements of the output's head."""
        return self.rows * self.row_size


class TurnPiece(NamedTuple):
    """A whole matrix: its rows are those of ``pieces``, and it goes into the output by columns."""

    pieces: tuple["Piece", ...]
    rows: int
    row_size: int

    @property
    def numel(self) -> int:
        """Elements."""
        return self.rows * self.row_size


Piece = CopyPiece | CastPiece | PoolPiece | TurnPiece

FormName = Literal["stock", "shipped code", "expanded"]
"""The stock class; a modelling file of ours; the stock class with merged heads repeated, which saves nothing."""

WORK = "work/"
"""Begins the names of work files; names of shards hold no slash."""


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the output: its bytes are its pieces', one after the other."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    source: TensorEntry

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return dtypes.nbytes(self.dtype, math.prod(self.shape))

    @property
    def changed(self) -> bool:
        """Whether heads are merged, repeated or reordered (a mere cast is no change)."""
        return self.shape != self.source.shape or any(
            isinstance(piece, (PoolPiece, TurnPiece))
            or isinstance(piece.source, ColumnRange)
            or piece.source.shard.startswith(WORK)
            for piece in self.pieces
        )


@dataclass(frozen=True)
class SiteWork:
    """One attention site that is merged as a whole, and the work file that its tensors go to.

    Attributes:
        site: the module.
        freedom: what its structure allows.
        shard: name of the work file, as pieces refer to it.
        tensors: (name, dtype, shape), one after the other in the file.
    """

    site: AttentionSite
    freedom: Freedom
    shard: str
    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]

    @property
    def nbytes(self) -> int:
        """Size of the work file."""
        return sum(dtypes.nbytes(dtype, math.prod(shape)) for _, dtype, shape in self.tensors)

    @property
    def parameters(self) -> Mapping[str, str]:
        """Names of the tensors inside the attention module -> their names in the checkpoint."""
        return {name.removeprefix(self.site.prefix): name for name, _, _ in self.tensors}

    def places(self) -> Mapping[str, ByteRange]:
        """Where each tensor lies in the work file."""
        places, start = {}, 0
        for name, dtype, shape in self.tensors:
            places[name] = ByteRange(self.shard, start, dtypes.nbytes(dtype, math.prod(shape)))
            start += places[name].nbytes
        return places


@dataclass(frozen=True)
class PlannedShard:
    """One safetensors file of the output."""

    name: str
    header: bytes
    tensors: tuple[PlannedTensor, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return len(self.header) + self.data_bytes

    @property
    def data_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True)
class ConversionPlan:
    """Everything about an output before a byte of it is written."""

    checkpoint: Checkpoint
    recipe: Recipe
    family: Family
    form: Form
    source_geometry: AttentionGeometry
    target_geometry: AttentionGeometry
    config_changes: Mapping[str, Any]
    config: Mapping[str, Any]
    initializer_range: float
    shards: tuple[PlannedShard, ...]
    sidecars: Sidecars
    layouts: tuple[Layout, Layout]
    work: tuple[SiteWork, ...]

    @property
    def index_file(self) -> str | None:
        """Name of the index, None if the output is one file."""
        return None if [shard.name for shard in self.shards] == [SINGLE_FILE] else INDEX_FILE

    @property
    def form_name(self) -> FormName:
        """Which kind of class holds the output's heads."""
        return "expanded" if self.recipe.expanded else "shipped code" if self.form.shipped else "stock"

    @property
    def code(self) -> Mapping[str, str]:
        """Modelling files of ours that the output needs: name -> text."""
        return {FILE: modelling_source(self.family)} if self.form.shipped else {}

    @property
    def total_size(self) -> int:
        """Bytes of all tensors."""
        return sum(shard.data_bytes for shard in self.shards)

    @property
    def output_bytes(self) -> int:
        """Bytes of all files of the output, the small generated ones not counted."""
        return sum(shard.nbytes for shard in self.shards) + self.sidecars.nbytes

    @property
    def work_bytes(self) -> int:
        """Bytes of the work files, which are deleted in the end."""
        return sum(work.nbytes for work in self.work) * (2 if self.recipe.joint else 1)

    @property
    def layerwise(self) -> tuple[SiteWork, ...]:
        """Where each site goes before all are refined together; else what ``work`` is."""
        if not self.recipe.joint:
            return self.work
        return tuple(replace(work, shard=f"{work.shard}-layerwise") for work in self.work)

    @property
    def changed(self) -> tuple[PlannedTensor, ...]:
        """The tensors that differ from the source by more than their type."""
        return tuple(tensor for shard in self.shards for tensor in shard.tensors if tensor.changed)


def plan_conversion(checkpoint: Checkpoint, recipe: Recipe) -> ConversionPlan:
    """Decide everything about the output.

    Raises:
        HeadCountError: the count is not legal for this model.
        UnsupportedModelError: the family cannot be converted.
        UnsupportedFormatError: K or V are stored in a type that cannot be pooled.
        CheckpointError: the checkpoint has errors that forbid a conversion.
    """
    sites = checkpoint.require_sites()
    family, config, index = checkpoint.require_family(), checkpoint.config, checkpoint.index
    check_method(recipe.method)
    source = sites[0].geometry
    if recipe.expanded:
        form = expanded_form(family, config, source, recipe.num_key_value_heads)
        target = source.with_kv_heads(source.num_attention_heads)
    else:
        form = form_for(family, config, source, recipe.num_key_value_heads)
        target = source.with_kv_heads(recipe.num_key_value_heads)
    changes = config_changes(family, form, config, target.num_key_value_heads)
    pooling = _Pooling(layouts := (family.layout, output_layout(family, form)), target, recipe.num_key_value_heads)
    touched = {tensor.entry.name: (site, tensor) for site in sites for tensor in site.tensors}
    work = _plan_work(checkpoint, recipe, layouts, target)
    places = {name: (dtype, shape, site.places()[name]) for site in work for name, dtype, shape in site.tensors}
    tensors = [
        (
            shard.shard,
            [_retyped(tensor, recipe.dtype) for tensor in _plan_shard(shard.entries, touched, places, pooling, form)],
        )
        for shard in index.shards
    ]
    dtype_keys = dict.fromkeys(("dtype", "torch_dtype"), dtypes.TORCH_NAMES[recipe.dtype]) if recipe.dtype else {}
    initializer_range = config.text.get("initializer_range", 0.02)
    if not isinstance(initializer_range, (int, float)) or not 0 < initializer_range < 10:
        raise InputError(f"config.json: initializer_range is {str(initializer_range)[:80]}, not a sensible number")
    return ConversionPlan(
        checkpoint=checkpoint,
        recipe=recipe,
        family=family,
        form=form,
        source_geometry=source,
        target_geometry=target,
        config_changes=changes,
        config=config.with_values(changes, everywhere=dtype_keys),
        initializer_range=float(initializer_range),
        shards=_shards(tensors, index, recipe.max_shard_size),
        sidecars=plan_sidecars(index),
        layouts=layouts,
        work=work,
    )


def _plan_work(
    checkpoint: Checkpoint, recipe: Recipe, layouts: tuple[Layout, Layout], target: AttentionGeometry
) -> tuple[SiteWork, ...]:
    """The sites that a site method merges as a whole; none for pooling methods, and where heads are repeated."""
    family, config = checkpoint.require_family(), checkpoint.config
    if (
        recipe.method not in SITE_METHODS
        or recipe.num_key_value_heads > checkpoint.sites[0].geometry.num_key_value_heads
    ):
        return ()
    plans, names = [], checkpoint.inner_names
    for number, site in enumerate(checkpoint.sites):
        freedom = freedom_of(site, family, config, names)
        if recipe.grouping != "adjacent" and freedom.order:
            raise UnsupportedModelError(
                f"--grouping {recipe.grouping}: the heads of {family.name} cannot be reordered: {freedom.order}",
                hint="leave it at adjacent",
            )
        tensors = []
        if any(tensor.part is Part.QUERY_GATED for tensor in site.tensors):
            raise UnsupportedModelError(
                f"--method {recipe.method}: the query projection of {family.name} also makes gates",
                hint="--method mean leaves it as it is",
            )
        for part, _, entry in rewritten(site):
            _require_poolable(entry)
            rows = entry.shape[0]
            if part is not Part.OUTPUT:
                rows = sum(block.rows for block in head_blocks(part, layouts[1], target))
            tensors.append((entry.name, recipe.dtype or entry.dtype, (rows, *entry.shape[1:])))
        plans.append(SiteWork(site, freedom, f"{WORK}{number:05d}", tuple(tensors)))
    return tuple(plans)


def _plan_shard(
    entries: tuple[TensorEntry, ...],
    touched: Mapping[str, tuple[AttentionSite, SiteTensor]],
    places: Mapping[str, tuple[str, tuple[int, ...], ByteRange]],
    pooling: "_Pooling",
    form: Form,
) -> Iterator[PlannedTensor]:
    for entry in entries:
        site, tensor = touched.get(entry.name, (None, None))
        kept = site is None or tensor is None or tensor.part in _KEPT
        # Of the attention's tensors only those that are (in, out) now.
        turned = turns(form, entry.name, tensor.part if tensor else None)
        turned = turned and (tensor is None or isinstance(tensor.entry, Transposed))
        if site is None and form.drops and re.search(form.drops, entry.name):
            continue
        if entry.name in places:
            dtype, shape, place = places[entry.name]
            assert tensor is not None
            if isinstance(tensor.entry, Transposed) and not turned:
                piece = CastPiece(columns(place, shape, dtype), dtype, entry.name)
                yield PlannedTensor(entry.name, dtype, shape[::-1], (piece,), entry)
            else:
                yield PlannedTensor(entry.name, dtype, shape, (CopyPiece(place),), tensor.entry)
        elif kept and turned:
            _require_poolable(entry)
            piece = CastPiece(columns(_bytes(entry), entry.shape, entry.dtype), entry.dtype, entry.name)
            yield PlannedTensor(entry.name, entry.dtype, entry.shape[::-1], (piece,), entry)
        elif site is None or tensor is None or kept:
            yield PlannedTensor(entry.name, entry.dtype, entry.shape, (CopyPiece(_bytes(entry)),), entry)
        elif tensor.part is Part.KEY_NORM_LIST:
            yield from _norm_list(site, tensor, pooling)
        else:
            planned = _blocks(site, tensor, pooling)
            if isinstance(tensor.entry, Transposed) and not turned:
                rows, row_size = planned.shape
                turn = TurnPiece(planned.pieces, rows, row_size)
                planned = PlannedTensor(planned.name, planned.dtype, (row_size, rows), (turn,), entry)
            yield planned


class _Pooling(NamedTuple):
    """Layouts before and after, heads of the output, and how many different ones are among its KV heads."""

    layouts: tuple[Layout, Layout]
    target: AttentionGeometry
    shared: int

    def behind(self, head: int, source_count: int) -> tuple[int, range]:
        """The number of an output's KV head among the different ones, and the source's heads that make it up."""
        number = head * self.shared // self.target.num_key_value_heads
        return number, source_heads(number, source_count, self.shared)


_KEPT = frozenset((Part.QUERY, Part.QUERY_GATED, Part.OUTPUT, Part.KEY_NORM_SHARED))


def columns(
    place: ByteRange, stored: tuple[int, ...], dtype: str, first: int = 0, count: int | None = None
) -> ColumnRange:
    """Columns of a matrix with the shape ``stored``, all of them by default."""
    height, width = stored
    itemsize = dtypes.BITS[dtype] // 8
    return ColumnRange(place.shard, place.start, height, width, first, width if count is None else count, itemsize)


def _blocks(site: AttentionSite, tensor: SiteTensor, pooling: "_Pooling") -> PlannedTensor:
    """A tensor made of head blocks, in the output's layout."""
    entry, part = tensor.entry, tensor.part
    _require_poolable(entry)
    blocks = head_blocks(part, pooling.layouts[0], site.geometry)
    total_rows = sum(block.rows for block in blocks)
    row_size = entry.numel // total_rows
    row_bytes = dtypes.nbytes(entry.dtype, row_size)
    places: dict[tuple[Part, int], Place] = {}
    row = 0
    for block in blocks:
        if isinstance(entry, Transposed):
            place: Place = columns(_bytes(entry), entry.shape[::-1], entry.dtype, row, block.rows)
        else:
            place = ByteRange(entry.shard, entry.start + row * row_bytes, block.rows * row_bytes)
        places[block.part, block.head] = place
        row += block.rows
    role = Role.NORM if part is Part.KEY_NORM else Role.BIAS if tensor.leaf == "bias" else Role.WEIGHT
    pieces: list[Piece] = []
    output_rows = 0
    for block in head_blocks(part, pooling.layouts[1], pooling.target):
        output_rows += block.rows
        if block.part is Part.QUERY:
            pieces.append(_unchanged(places[block.part, block.head], entry))
            continue
        shared, heads = pooling.behind(block.head, site.geometry.num_key_value_heads)
        sources = tuple(places[block.part, head] for head in heads)
        key = f"{entry.name}/{block.part.name}/{shared}"
        pieces.append(_pooled(sources, entry, block.rows, row_size, role, key))
    shape = (entry.shape[0] * output_rows // total_rows, *entry.shape[1:])
    return PlannedTensor(entry.name, entry.dtype, shape, tuple(pieces), entry)


def _pooled(sources: tuple[Place, ...], entry: TensorEntry, rows: int, row_size: int, role: Role, key: str) -> Piece:
    if len(sources) == 1:
        return _unchanged(sources[0], entry)
    return PoolPiece(sources, entry.dtype, rows, row_size, role, key)


def _unchanged(place: Place, entry: TensorEntry) -> CopyPiece | CastPiece:
    return CopyPiece(place) if isinstance(place, ByteRange) else CastPiece(place, entry.dtype, entry.name)


def _norm_list(site: AttentionSite, tensor: SiteTensor, pooling: "_Pooling") -> Iterator[PlannedTensor]:
    """Key norms with one tensor a KV head: renumbered, all written where number 0 was."""
    if tensor.number:
        return
    siblings = {other.number: other.entry for other in site.tensors if (other.part, other.leaf) == tensor[2:4]}
    for entry in siblings.values():
        _require_poolable(entry)
    for head in range(pooling.target.num_key_value_heads):
        _, heads = pooling.behind(head, site.geometry.num_key_value_heads)
        name = f"{site.prefix}{tensor.name}.norms.{head}.{tensor.leaf}"
        entry = siblings[heads[0]]
        sources = tuple(_bytes(siblings[number]) for number in heads)
        piece = _pooled(sources, entry, entry.numel, 1, Role.NORM, name)
        yield PlannedTensor(name, entry.dtype, entry.shape, (piece,), entry)


def _bytes(entry: TensorEntry) -> ByteRange:
    return ByteRange(entry.shard, entry.start, entry.nbytes)


def _require_poolable(entry: TensorEntry) -> None:
    if entry.dtype not in dtypes.TORCH_NAMES:
        raise UnsupportedFormatError(
            f"{entry.name} is stored as {entry.dtype}: heads can be pooled in {', '.join(dtypes.TORCH_NAMES)} only",
            hint="convert the original weights, then quantise the result",
        )


def _retyped(tensor: PlannedTensor, dtype: str | None) -> PlannedTensor:
    """The tensor in another floating type; whatever is no float keeps its own."""
    if dtype is None or tensor.dtype == dtype or tensor.dtype not in dtypes.TORCH_NAMES:
        return tensor
    pieces = tuple(
        CastPiece(piece.source, tensor.dtype, tensor.name) if isinstance(piece, CopyPiece) else piece
        for piece in tensor.pieces
    )
    return PlannedTensor(tensor.name, dtype, tensor.shape, pieces, tensor.source)


def _shards(
    tensors: list[tuple[str, list[PlannedTensor]]], index: CheckpointIndex, max_shard_size: int | None
) -> tuple[PlannedShard, ...]:
    metadata: dict[str, str] = {}
    for shard in index.shards:
        metadata.update(shard.metadata)
    metadata["format"] = "pt"
    if max_shard_size is None:
        single = len(tensors) == 1
        return tuple(_shard(SINGLE_FILE if single else name, found, metadata) for name, found in tensors)
    packed: list[list[PlannedTensor]] = [[]]
    room = max_shard_size
    for tensor in (tensor for _, found in tensors for tensor in found):
        if tensor.nbytes > room and packed[-1]:
            packed.append([])
            room = max_shard_size
        packed[-1].append(tensor)
        room -= tensor.nbytes
    if len(packed) == 1:
        return (_shard(SINGLE_FILE, packed[0], metadata),)
    return tuple(
        _shard(f"model-{number:05d}-of-{len(packed):05d}.safetensors", found, metadata)
        for number, found in enumerate(packed, start=1)
    )


def _shard(name: str, tensors: list[PlannedTensor], metadata: Mapping[str, str]) -> PlannedShard:
    # Wide types first, as the library writes them: every tensor stays aligned to its element size.
    ordered = sorted(tensors, key=lambda tensor: -dtypes.BITS[tensor.dtype])
    header = build_header(((tensor.name, tensor.dtype, tensor.shape) for tensor in ordered), metadata)
    return PlannedShard(name, header, tuple(ordered))


def cache_bytes_per_token(plan: ConversionPlan) -> dict[str, int]:
    """KV-cache bytes a token of the decoder before and after, in the type of K before and after.

    What cross-attention keeps for each token of an encoder is not in it; it shrinks by the same factor.
    """
    geometry = plan.source_geometry
    width = (geometry.head_dim + geometry.value_head_dim) * plan.checkpoint.self_attentions
    changed = plan.changed[0]
    return {
        "source": width * geometry.num_key_value_heads * dtypes.BITS[changed.source.dtype] // 8,
        "target": width * plan.target_geometry.num_key_value_heads * dtypes.BITS[changed.dtype] // 8,
    }


def index_document(plan: ConversionPlan) -> dict[str, Any]:
    """The content of model.safetensors.index.json."""
    weight_map = {tensor.name: shard.name for shard in plan.shards for tensor in shard.tensors}
    return {"metadata": {"total_size": plan.total_size}, "weight_map": dict(sorted(weight_map.items()))}


def recipe_document(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON, for provenance and for telling two runs apart."""
    return asdict(recipe)


def fingerprint(plan: ConversionPlan, source: LocalFolder) -> str:
    """A digest of all that decides the output's bytes; a resumed run must have the same.

    The headers of the source's shards are in it, and the time of their last change, not their data.
    """
    shards = plan.checkpoint.index.shards
    state = {
        "tool": __version__,
        "recipe": recipe_document(plan.recipe),
        "source": [(shard.shard, source.stamp(shard.shard), list(shard.entries)) for shard in shards],
        "config": plan.config,
        "code": plan.code,
        "sidecars": [(name, source.stamp(name)) for name in plan.sidecars.names],
        "headers": [(shard.name, hashlib.sha256(shard.header).hexdigest()) for shard in plan.shards],
    }
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
