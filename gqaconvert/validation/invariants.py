"""What must hold of methods that rewrite Q, K, V and O together, whatever they choose.

Every row of a merged K or V head is a combination of the rows of its group's heads; every row of Q' lies in the row
space of that query head, and every column of its part of W_O in the column space of the source's. Where a merge is
refined afterwards nothing of this need hold, and only finite numbers are asked for.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gqaconvert.checkpoint import dtypes
from gqaconvert.families import Part
from gqaconvert.families.sites import AttentionSite
from gqaconvert.validation.pair import Pair
from gqaconvert.validation.rows import head_rows, members
from gqaconvert.validation.shards import Shards
from gqaconvert.validation.types import Check, verdict

# Rounding moves every number by half a unit in the last place: so much of a head leaves the space it was made in.
_PRECISION = {"F64": 2.0**-53, "F32": 2.0**-24, "F16": 2.0**-11, "BF16": 2.0**-8}
_ROUNDINGS = 32


def check_invariants(
    pair: Pair, comparable: frozenset[str], source: Shards, output: Shards, advance: Callable[[int], None]
) -> Check:
    """Check all attention modules.

    Raises:
        StorageError: a file cannot be read.
    """
    free = pair.recipe.get("refine") is not None or pair.recipe.get("grouping", "adjacent") != "adjacent"
    faults: list[str] = []
    worst = 0.0
    for site in pair.source.sites:
        for tensor in site.tensors:
            name = tensor.entry.name
            if name not in comparable or name not in pair.merged_names():
                continue
            advance(tensor.entry.nbytes)
            after = output.tensor(pair.index.entries[name])
            if not torch.isfinite(after).all():
                faults.append(f"{name}: not finite")
            elif tensor.leaf == "weight" and not free:
                outside = _outside(pair, site, tensor.part, source.tensor(tensor.entry), after)
                allowed = _ROUNDINGS * max(_PRECISION[d] for d in (tensor.entry.dtype, pair.index.entries[name].dtype))
                worst = max(worst, outside / allowed)
                if outside > allowed:
                    faults.append(f"{name}: {outside:.1%} of a head lies outside the space of its source heads")
    asked = "all numbers are finite (after --refine or regrouping no more is promised)" if free else (
        "every head of Q, K, V and O lies in the space of its source heads"
    )  # fmt: skip
    return verdict("files.invariants", faults, asked, "heads that no merge of the source makes", worst_share=worst)


def _outside(pair: Pair, site: AttentionSite, part: Part, before: Tensor, after: Tensor) -> float:
    """The largest relative part of a head that lies outside the span of the heads it may be made from."""
    geometry = site.geometry
    target = geometry.with_kv_heads(pair.kv_heads)
    if part is Part.OUTPUT:
        share = geometry.value_head_dim
        heads = range(geometry.num_attention_heads)
        columns = [slice(head * share, (head + 1) * share) for head in heads]
        return max(_residual(before[:, place].T, after[:, place].T) for place in columns)
    sources, results = head_rows(part, pair.layouts[0], geometry), head_rows(part, pair.layouts[1], target)
    worst = 0.0
    for role, rows in results.items():
        for head, numbers in enumerate(rows):
            behind = [head]
            if role is not Part.QUERY:
                behind = members(head, geometry.num_key_value_heads, pair.kv_heads)
            basis = before[torch.cat([sources[role][other] for other in behind])]
            worst = max(worst, _residual(basis, after[numbers]))
    return worst


def _residual(basis: Tensor, rows: Tensor) -> float:
    """Norm of what is left of ``rows`` (n, E) outside the row space of ``basis`` (m, E), relative to their norm."""
    if basis.shape[0] >= basis.shape[1]:
        return 0.0
    exact = rows.to(torch.float64)
    frame, _ = torch.linalg.qr(basis.to(torch.float64).T)
    left = exact - (exact @ frame) @ frame.T
    norm = float(exact.norm())
    return float(left.norm()) / norm if norm else 0.0


assert set(_PRECISION) == set(dtypes.TORCH_NAMES)
