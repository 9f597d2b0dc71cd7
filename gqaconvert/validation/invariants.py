"""What must hold of methods that rewrite Q, K, V and O together: recomputed in float64, not with the merge's code.

Such a merge chooses, for every KV head j of a group, a change of basis: Q' = A_j Q for the query heads that read it,
and O' = O B_j. The choice can be read off the output. Given it, the definitions of the methods leave nothing open:

- A_j commutes with the position scheme: one complex factor a rotary pair, any matrix on dimensions that are not
  rotated; signs or nothing where a norm follows. So a wrong rotary layout shows in Q' alone.
- ``subspace``: K' and V' are the shared head from which, through Q' and O', the group's heads are restored best: the
  normal equations V' = (sum O'^T O')^-1 sum O'^T O V_j, and the same for K by rotary pair, up to one scale. What O'
  keeps of V is kept exactly. ``align``: A_j and B_j are orthogonal, K' and V' the mean of A_j K_j and B_j^T V_j.
- The energy of the group: of K' in both methods, of V' in ``align``; in ``subspace`` O' is orthonormal over the group.
- A bias is one more input column, and takes part in everything with the same factors.

Weights of calibration are not in the output. Where they decide (scales; K of ``subspace``), only the span is asked for.
After refinement or regrouping nothing of this need hold, and only finite numbers are asked for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

import torch
from torch import Tensor

from gqaconvert.checkpoint.headers import TensorEntry
from gqaconvert.families import Layout, Part
from gqaconvert.families.sites import AttentionGeometry, AttentionSite, rewritten
from gqaconvert.merge.freedom import Freedom, freedom_of
from gqaconvert.merge.heads import KeyFreedom
from gqaconvert.validation.pair import Pair
from gqaconvert.validation.rows import head_rows, members
from gqaconvert.validation.shards import Shards, torch_type
from gqaconvert.validation.types import Check, skipped, verdict

_FLOOR = 1e-7
"""The methods weigh a direction that nobody reads by at least this part of the strongest."""
_SLACK = 1e-3
"""Relative, for what that floor moves: its root is 3e-4. Far below what any fault moves."""

_ASKED = {
    "files.merged-keys": ("Q was rewritten as its position scheme allows, and K is the shared head that belongs to it",
                          "K is not the shared head that belongs to Q, or Q was rewritten as nothing allows"),
    "files.merged-values": ("O was rewritten by one matrix a head, and V is the shared head that belongs to it",
                            "V is not the shared head that belongs to O"),
    "files.merged-norms": ("shared heads have the energy of their group", "shared heads have another energy"),
    "files.merged-biases": ("biases were merged with their weights", "biases were not merged with their weights"),
}  # fmt: skip


@dataclass
class _Findings:
    """Faults by check, and the largest deviation as a part of what is allowed."""

    faults: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in _ASKED})
    worst: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_ASKED, 0.0))

    def ask(self, check: str, place: str, found: Tensor, wanted: Tensor, allowed: float, terms: float = 0.0) -> bool:
        """Compare by Frobenius norm, relative to the larger one (or to ``terms`` that may cancel)."""
        size = max(float(found.norm()), float(wanted.norm()), terms)
        off = float((found - wanted).norm())
        if size:
            self.worst[check] = max(self.worst[check], off / size / allowed)
        if off > allowed * size:
            self.faults[check].append(f"{place}: off by {off / size:.1%}")
        return off <= allowed * size


class _Side(NamedTuple):
    """One attention module in one folder."""

    site: AttentionSite
    shards: Shards
    entries: Mapping[str, TensorEntry]
    layout: Layout
    geometry: AttentionGeometry

    def rows(self, part: Part, head: int) -> Tensor:
        """A head of Q, K or V in float64, its bias (or zeros) as a last column: (D, E + 1)."""
        stored = part if self.site.find(part) else Part.QKV
        place = head_rows(stored, self.layout, self.geometry)[part][head]
        count = place.stop - place.start
        weight, bias = self.site.find(stored), self.site.find(stored, "bias")
        assert weight is not None
        columns = [self.shards.rows(self.entries[weight.name], place.start, count, weight.shape[1]).to(torch.float64)]
        if bias is None:
            columns.append(torch.zeros(count, 1, dtype=torch.float64))
        else:
            columns.append(self.shards.rows(self.entries[bias.name], place.start, count, 1).to(torch.float64))
        return torch.cat(columns, dim=1)

    def output(self) -> Tensor:
        """W_O as it is stored: (E, H * Dv)."""
        entry = self.site.find(Part.OUTPUT)
        assert entry is not None
        return self.shards.tensor(self.entries[entry.name])


def check_invariants(
    pair: Pair, comparable: frozenset[str], source: Shards, output: Shards, advance: Callable[[int], None]
) -> list[Check]:
    """Check all attention modules whose tensors have the right shapes.

    Raises:
        StorageError: a file cannot be read.
    """
    begun = monotonic()
    open_ended = not pair.record.exact
    not_finite: list[str] = []
    findings = _Findings()
    for site in pair.source.sites:
        names = [entry.name for _, _, entry in rewritten(site)]
        advance(sum(entry.nbytes for _, _, entry in rewritten(site)))
        if not comparable.issuperset(names):
            continue
        bad = [name for name in names if not torch.isfinite(output.tensor(pair.index.entries[name])).all()]
        not_finite += [f"{name}: not finite" for name in bad]
        if not bad and not open_ended:
            _Site(pair, site, source, output, findings).check()
    checks = [
        verdict("files.merged-finite", not_finite, "all merged numbers are finite", "numbers that are not finite")
    ]
    if open_ended:
        why = "after --refine, regrouping or uptraining, numbers are only asked to be finite"
        return [*checks, *(skipped(name, why) for name in _ASKED)]
    seconds = monotonic() - begun
    for name, (good, bad_news) in _ASKED.items():
        faults, worst = findings.faults[name], findings.worst[name]
        checks.append(verdict(name, faults, good, bad_news, seconds=seconds, worst_share_of_tolerance=worst))
        seconds = 0.0
    return checks


class _Site:
    """The questions to one attention module."""

    def __init__(self, pair: Pair, site: AttentionSite, source: Shards, output: Shards, findings: _Findings) -> None:
        config, family = pair.source.config, pair.source.require_family()
        target = site.geometry.with_kv_heads(pair.kv_heads)
        self.before = _Side(site, source, pair.source.index.entries, pair.layouts[0], site.geometry)
        self.after = _Side(site, output, pair.index.entries, pair.layouts[1], target)
        self.freedom: Freedom = freedom_of(site, family, config, pair.source.inner_names)
        self.aligned = pair.method == "align"
        self.calibrated = pair.record.calibrated
        self.findings = findings
        # Rounding moves a number by at most half of eps, and so a head; what is read off Q' and O' has that error too.
        types = {torch_type(pair.index.entries[entry.name].dtype) for _, _, entry in rewritten(site)}
        self.allowed = max(torch.finfo(kind).eps for kind in types) + _SLACK

    def check(self) -> None:
        """All groups."""
        old, new = self.before.output(), self.after.output()
        geometry = self.before.geometry
        for group in range(self.after.geometry.num_key_value_heads):
            behind = members(group, geometry.num_key_value_heads, self.after.geometry.num_key_value_heads)
            self._keys(group, behind)
            self._values(group, behind, old, new)

    def _readers(self, head: int) -> range:
        return range(head * self.before.geometry.queries_per_kv, (head + 1) * self.before.geometry.queries_per_kv)

    def _keys(self, group: int, behind: list[int]) -> None:
        where = f"{self.before.site.prefix}, KV head {group}"
        found = self.after.rows(Part.KEY, group)
        changes, metrics = [], []
        for head in behind:
            old = torch.stack([self.before.rows(Part.QUERY, reader) for reader in self._readers(head)])
            new = torch.stack([self.after.rows(Part.QUERY, reader) for reader in self._readers(head)])
            change = self._key_change(old[..., :-1], new[..., :-1])
            changes.append(change)
            wanted = change @ old
            place = f"{where}: Q of source head {head}"
            if not self.findings.ask("files.merged-keys", place, new[..., :-1], wanted[..., :-1], self.allowed):
                return  # to wrong queries no key is right
            self.findings.ask("files.merged-biases", place, new[..., -1], wanted[..., -1], self.allowed)
            metrics.append((old @ old.mT).sum(0))
        if self.calibrated and (not self.aligned or self.freedom.rotary.keys is not KeyFreedom.ROTATION):
            self._spans(where, found, [self.before.rows(Part.KEY, head) for head in behind], changes)
            return
        total, energy = _Sum(found), 0.0
        for head, change, weight in zip(behind, changes, self._key_weights(metrics), strict=True):
            key = self.before.rows(Part.KEY, head)
            if self.freedom.rotary.keys is not KeyFreedom.ROTATION:
                energy += float(key.square().sum()) / len(behind)
                key = key / key.norm() if key.any() else key
            elif self.aligned:
                energy += float(key.square().sum()) / len(behind)
            else:
                energy += self._halved(((weight @ key) * key).sum(1))
            total.add(change @ weight @ key)
        right = self._compare("files.merged-keys", f"{where}: K", found, total.scaled_to(found))
        if right and not self.calibrated:
            plain = self.aligned or self.freedom.rotary.keys is not KeyFreedom.ROTATION
            rows = total.total.square().sum(1)
            self._energy(f"{where}: K", float(rows.sum()) if plain else self._halved(rows), energy)

    def _key_change(self, old: Tensor, new: Tensor) -> Tensor:
        """A (D, D) with Q' ~ A Q, of the form that the position scheme allows; from (readers, D, E) each."""
        rotary = self.freedom.rotary
        size = old.shape[1]
        cross = (new @ old.mT).sum(0)
        if rotary.keys is KeyFreedom.FIXED:
            return torch.eye(size, dtype=torch.float64)
        real, imaginary = rotary.pairs()
        rest = slice(rotary.dim, size)
        change = torch.zeros(size, size, dtype=torch.float64)
        if rotary.keys is KeyFreedom.SIGN:
            agreement = cross.diagonal().clone()
            agreement[real] = agreement[imaginary] = agreement[real] + agreement[imaginary]
            return torch.diag(torch.where(agreement < 0, -1.0, 1.0).to(torch.float64))
        power = old.square().sum((0, 2))
        scale = power[real] + power[imaginary]
        straight, across = (
            cross[real, real] + cross[imaginary, imaginary],
            cross[imaginary, real] - cross[real, imaginary],
        )
        if self.aligned:
            scale = torch.hypot(straight, across)
        scale = torch.where(scale > 0, scale, 1.0)
        change[real, real] = change[imaginary, imaginary] = straight / scale
        change[imaginary, real], change[real, imaginary] = across / scale, -across / scale
        if rotary.dim < size:
            change[rest, rest] = self._matrix(
                old[:, rest].transpose(0, 1).flatten(1), new[:, rest].transpose(0, 1).flatten(1)
            )
        return change

    def _matrix(self, old: Tensor, new: Tensor) -> Tensor:
        """A with A old ~ new, (D, n) each; orthogonal where the method says so."""
        if self.aligned:
            left, _, right = torch.linalg.svd(new @ old.T)
            turn: Tensor = left @ right
            return turn
        return _solve(old.T, new.T).T

    def _key_weights(self, metrics: Sequence[Tensor]) -> list[Tensor]:
        """What each head counts by in the sum, from what its readers see: (D, D) each."""
        rotary = self.freedom.rotary
        eye = torch.eye(len(metrics[0]), dtype=torch.float64)
        if self.aligned or rotary.keys is not KeyFreedom.ROTATION:
            return [eye] * len(metrics)
        real, imaginary = rotary.pairs()
        powers = torch.stack([metric.diagonal()[real] + metric.diagonal()[imaginary] for metric in metrics])
        strongest = powers.amax(0)
        powers = torch.where(strongest > 0, torch.maximum(powers, _FLOOR * strongest), 1.0)
        weights = []
        for metric, power in zip(metrics, powers, strict=True):
            weight = torch.zeros_like(eye)
            weight[real, real] = weight[imaginary, imaginary] = power
            weight[rotary.dim :, rotary.dim :] = metric[rotary.dim :, rotary.dim :]
            weights.append(weight)
        return weights

    def _halved(self, rows: Tensor) -> float:
        """The energy of a key's rows: a rotary pair is one complex number, whose power both of its rows share."""
        return float(rows[: self.freedom.rotary.dim].sum()) / 2 + float(rows[self.freedom.rotary.dim :].sum())

    def _spans(self, where: str, found: Tensor, heads: list[Tensor], changes: list[Tensor]) -> None:
        """K' lies in the span of the group's heads: with one factor a head, or one for every rotary pair of a head."""
        rotary = self.freedom.rotary
        total = _Sum(found)
        if rotary.keys is not KeyFreedom.ROTATION:
            turned = torch.stack([change @ head for change, head in zip(changes, heads, strict=True)])
            factors = _solve(turned[..., :-1].flatten(1).T, found[:, :-1].flatten()[:, None])
            for factor, head in zip(factors, turned, strict=True):
                total.add(factor * head)
        else:
            parts = torch.zeros(len(heads), *found.shape, dtype=torch.float64)
            for real, imaginary in zip(*rotary.pairs(), strict=True):
                basis = torch.stack([torch.complex(head[real], head[imaginary]) for head in heads])
                row = torch.complex(found[real], found[imaginary])
                pair = _solve(basis[:, :-1].T, row[:-1, None]) * basis
                parts[:, real], parts[:, imaginary] = pair.real, pair.imag
            rest = torch.stack(heads)[:, rotary.dim :]
            if rest.numel():
                factors = _solve(rest[..., :-1].flatten(0, 1).T, found[rotary.dim :, :-1].T)
                parts[:, rotary.dim :] = torch.einsum("jdr,jde->jre", factors.view(*rest.shape[:2], -1), rest)
            for part in parts:
                total.add(part)
        self._compare("files.merged-keys", f"{where}: K", found, total)

    def _values(self, group: int, behind: list[int], old_output: Tensor, new_output: Tensor) -> None:
        where = f"{self.before.site.prefix}, KV head {group}"
        width = self.before.geometry.value_head_dim
        found = self.after.rows(Part.VALUE, group)
        total, energy = _Sum(found), 0.0
        kept = torch.zeros(width, width, dtype=torch.float64)
        for head in behind:
            places = [slice(reader * width, (reader + 1) * width) for reader in self._readers(head)]
            old = torch.cat([old_output[:, place] for place in places]).to(torch.float64)
            new = torch.cat([new_output[:, place] for place in places]).to(torch.float64)
            change = torch.eye(width, dtype=torch.float64)
            if self.freedom.rotary.values_free:
                change = self._matrix(old.T, new.T)
            place = f"{where}: O of source head {head}"
            if not self.findings.ask("files.merged-values", place, new, old @ change.T, self.allowed):
                return
            value = self.before.rows(Part.VALUE, head)
            energy += float(value.square().sum()) / len(behind)
            total.add(change @ value if self.aligned else change @ (old.T @ old) @ value)
            kept += new.T @ new
        if self.aligned:
            right = self._compare("files.merged-values", f"{where}: V", found, total.scaled_to(found))
            if right and not self.calibrated:
                self._energy(f"{where}: V", float(total.total.square().sum()), energy)
            return
        self._compare("files.merged-values", f"{where}: V", found, total.solved(kept))
        if self.freedom.rotary.values_free:
            eye = torch.eye(width, dtype=torch.float64)
            self.findings.ask("files.merged-norms", f"{where}: O", kept, eye, 2 * self.allowed)

    def _compare(self, check: str, place: str, found: Tensor, wanted: "_Sum") -> bool:
        """Whether the weights are right; if so, their bias is asked too: of a wrong head no bias is right."""
        right = self.findings.ask(check, place, found[:, :-1], wanted.total[:, :-1], self.allowed)
        if right:
            self.findings.ask(
                "files.merged-biases", place, found[:, -1], wanted.total[:, -1], self.allowed, wanted.biases
            )
        return right

    def _energy(self, place: str, found: float, wanted: float) -> None:
        both = torch.tensor([found, wanted], dtype=torch.float64).sqrt()
        self.findings.ask("files.merged-norms", place, both[:1], both[1:], self.allowed)


class _Sum:
    """A sum of heads with their biases (D, E + 1), and how large the biases were before they could cancel."""

    def __init__(self, like: Tensor) -> None:
        self.total = torch.zeros_like(like)
        self.biases = 0.0

    def add(self, head: Tensor) -> None:
        """Add a head."""
        self.total += head
        self.biases += float(head[:, -1].norm())

    def scaled_to(self, found: Tensor) -> "_Sum":
        """With the positive factor that brings the weights closest to ``found``."""
        size = float(self.total[:, :-1].square().sum())
        factor = max(0.0, float((found[:, :-1] * self.total[:, :-1]).sum()) / size) if size else 1.0
        self.total *= factor
        self.biases *= factor
        return self

    def solved(self, matrix: Tensor) -> "_Sum":
        """Multiplied by the inverse of a matrix (D, D)."""
        self.total = _solve(matrix, self.total)
        self.biases *= float(torch.linalg.matrix_norm(torch.linalg.pinv(matrix), 2))
        return self


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """The least-squares solution, the shortest one where there are several."""
    solution: Tensor = torch.linalg.lstsq(matrix, right, driver="gelsd").solution
    return solution
