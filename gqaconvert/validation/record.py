"""gqaconvert.json as far as it can be trusted: fields of the right kind, and what is wrong with others. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gqaconvert.checkpoint import dtypes
from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.index import read_json
from gqaconvert.errors import CheckpointError
from gqaconvert.sidecars import PROVENANCE


@dataclass(frozen=True)
class Record:
    """What the output says of its own making.

    Attributes:
        present: whether there is a gqaconvert.json.
        faults: fields that are missing or of a wrong kind, one line each.
        method: mean where no record says another.
        num_key_value_heads: None where the record does not say.
        dtype: safetensors name of the type that floats were stored in, None for each tensor's own.
        family: layout that the user vouched for, None for that of the model_type.
        exact: whether nothing came after the method: no refinement, no regrouping, no training.
        trained: what uptraining trained since, "all", "attention" or "kv"; None without it.
        calibrated: whether text decided with the weights.
        hashes: shard -> sha256.
        source: what it says of the source.
        result: what it says of the output.
    """

    present: bool = False
    faults: tuple[str, ...] = ()
    method: str = "mean"
    num_key_value_heads: int | None = None
    dtype: str | None = None
    family: str | None = None
    exact: bool = True
    trained: str | None = None
    calibrated: bool = False
    hashes: Mapping[str, str] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)
    result: Mapping[str, Any] = field(default_factory=dict)


def read_record(folder: LocalFolder) -> Record:
    """Read gqaconvert.json; a damaged one has faults, and raises nothing.

    Of a model that was uptrained, the conversion is described by the record within its record.
    """
    if PROVENANCE not in folder.sizes:
        return Record()
    try:
        document = read_json(folder, PROVENANCE)
    except CheckpointError as error:
        return Record(present=True, faults=(error.message,))
    faults: list[str] = []

    def table(name: str) -> Mapping[str, Any]:
        found = document.get(name)
        if isinstance(found, dict):
            return found
        faults.append(f"{PROVENANCE}: {name} is no table")
        return {}

    shards, result, trained = table("shards"), table("result"), None
    while isinstance(step := document.get("recipe"), dict) and step.get("command") == "uptrain":
        trained = _widest(trained, step.get("trainable"))
        inner = document.get("source")
        inner = inner.get("provenance") if isinstance(inner, dict) else None
        if not isinstance(inner, dict):
            faults.append(f"{PROVENANCE}: the model was uptrained, and nothing says how it was converted")
            break
        document = inner
    recipe = table("recipe")

    def said(name: str, kind: type | tuple[type, ...], default: Any) -> Any:  # noqa: ANN401
        found = recipe.get(name, default)
        if found is None or (isinstance(found, kind) and not isinstance(found, bool)):
            return found
        faults.append(f"{PROVENANCE}: {name} of the recipe is {str(found)[:60]}")
        return default

    method, count = said("method", str, "mean"), said("num_key_value_heads", int, None)
    stored = said("dtype", str, None)
    if method is None:
        faults.append(f"{PROVENANCE}: the recipe has no method")
    if stored is not None and stored not in dtypes.TORCH_NAMES:
        faults.append(f"{PROVENANCE}: dtype of the recipe is {stored[:60]}")
        stored = None
    hashes = {
        shard: fields["sha256"]
        for shard, fields in shards.items()
        if isinstance(fields, dict) and isinstance(fields.get("sha256"), str)
    }
    faults += [f"{PROVENANCE}: no sha256 of {shard[:80]}" for shard in shards if shard not in hashes]
    later = (said("refine", (int, str), None), said("joint", int, None))
    grouping = said("grouping", str, "adjacent")
    family, calibration = said("family", str, None), said("calibration", dict, None)
    source = table("source")
    return Record(
        True, tuple(faults), method or "mean", count, stored, family,
        later == (None, None) and grouping == "adjacent" and trained is None, trained, calibration is not None,
        hashes, source, result,
    )  # fmt: skip


def _widest(one: str | None, other: object) -> str:
    """Of two trainings, what changed in either; "all" where that is not said."""
    order = ("kv", "attention", "all")
    places = [order.index(each) for each in (one, other) if each in order]
    return order[max(places)] if other in order else "all"
