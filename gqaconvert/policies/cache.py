"""A cache layer that lets entries go. Needs transformers.

To the model, an `EvictLayer` is a full cache: its length is the number of tokens seen, so positions and masks are
those of the whole sequence. What it stores is less, and ``slots`` says of each entry which token it was; the attention
function (`gqaconvert.policies.attention`) picks the columns of the mask by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer

from gqaconvert.errors import InputError, UnsupportedModelError
from gqaconvert.policies.scores import kind_named
from gqaconvert.policies.spec import KVPolicy
from gqaconvert.policies.step import Step, seen

_updated: ContextVar[EvictLayer | None] = ContextVar("updated", default=None)
"""The layer between its update and the attention that follows: transformers hands that the keys, not the cache."""


_decided: ContextVar[int] = ContextVar("decided", default=0)
"""The attention module (its ``id``) after which a layer decided last."""

_watch: ContextVar[Callable[[], None]] = ContextVar("watch", default=lambda: None)
"""Called when a layer has attended and has not evicted yet: the cache is never larger."""


def begin_pass() -> None:
    """Forget what a pass left behind that was interrupted."""
    _updated.set(None)
    _decided.set(0)


def take_updated(module: nn.Module) -> EvictLayer | None:
    """The layer whose entries ``module`` attends to, once for each update; None if they are under no policy.

    Raises:
        UnsupportedModelError: the module attends again to entries of which some have been evicted.
    """
    layer = _updated.get()
    if layer is not None:
        begin_pass()
        _decided.set(id(module))
    elif _decided.get() == id(module):
        raise UnsupportedModelError(f"{type(module).__name__} attends more than once, and a policy decides after once")
    return layer


class EvictLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of one layer under a policy: (B, G, n, D) each.

    Attributes:
        policy: what decides.
        index: number of the layer.
        seen_tokens: tokens so far, padding included: what the model takes as the cache's length.
        slots: (B, 1 or G, n), int32: token of each entry, -1 where a shorter sequence of the batch has none left;
            None while nothing has been evicted. One row for all heads where the layer decides as one.
        sums: (B, G, n), float32: attention received so far, for policies that accumulate it.
    """

    is_croppable = False

    def __init__(self, policy: KVPolicy, index: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy = policy
        self.index = index
        self.seen_tokens = 0
        self.slots: Tensor | None = None
        self.sums: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Append (B, G, q, D) each; returns all that is stored.

        Raises:
            InputError: the update before this one was not followed by an attention that evicts.
        """
        if _updated.get() is not None:
            _updated.set(None)
            raise InputError(
                "a cache with a policy was updated, and its attention did not evict",
                hint="use it inside `with apply_policy(model, policy):`",
            )
        new = key_states.shape[-2]
        if self.slots is not None:
            tail = torch.arange(self.seen_tokens, self.seen_tokens + new, dtype=torch.int32, device=self.slots.device)
            self.slots = torch.cat([self.slots, tail.expand(*self.slots.shape[:2], new)], dim=-1)
        self.seen_tokens += new
        states: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        _updated.set(self)
        return states

    @property
    def entries(self) -> tuple[Tensor, Tensor]:
        """Keys and values, (B, G, n, D) each."""
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Tokens seen, not entries stored: it decides positions and what ``generate`` feeds next."""
        return self.seen_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The mask is that of a full cache."""
        return self.seen_tokens + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what is gone cannot come back.

        Raises:
            InputError: always, unless nothing is to be removed.
        """
        if tokens_to_remove:
            raise InputError(
                f"a cache under {self.policy} cannot be cropped: evicted entries cannot come back",
                hint="assisted decoding and prompt lookup need the full cache",
            )

    def reset(self) -> None:
        """Back to an empty layer."""
        super().reset()
        self.seen_tokens, self.slots, self.sums = 0, None, None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: the batch in another order."""
        super().reorder_cache(beam_idx)  # type: ignore[arg-type]
        self._rows(lambda state: state.index_select(0, beam_idx.to(state.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence so many times."""
        super().batch_repeat_interleave(repeats)
        self._rows(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these sequences."""
        super().batch_select_indices(indices)
        self._rows(lambda state: state[indices, ...])

    def _rows(self, change: Any) -> None:  # noqa: ANN401
        self.slots = None if self.slots is None else change(self.slots)
        self.sums = None if self.sums is None else change(self.sums)

    def own_mask(self, mask: Tensor | None, heads: int) -> Tensor | None:
        """The columns of the entries that are stored.

        Args:
            mask: (B or 1, 1, q, tokens seen) of the whole sequence, boolean or to be added; None: nothing is hidden.
            heads: query heads.

        Returns:
            (B, 1 or ``heads``, q, n), None if nothing is hidden.

        Raises:
            InputError: the mask is not the same for all heads.
        """
        if mask is not None and mask.shape[1] != 1:
            raise InputError(f"a cache under {self.policy}: masks that differ between heads are not supported")
        if mask is None or self.slots is None:
            return mask
        batch, groups = self.slots.shape[:2]
        columns = self.slots.clamp(min=0).long()[:, :, None].expand(-1, -1, mask.shape[2], -1)
        own = mask.expand(batch, groups, -1, -1).gather(3, columns)
        gone = (self.slots < 0)[:, :, None]
        own = own & ~gone if own.dtype == torch.bool else own.masked_fill(gone, torch.finfo(own.dtype).min)
        return own if groups == 1 else own.repeat_interleave(heads // groups, dim=1)

    def evict(
        self, queries: Tensor, mask: Tensor | None, own: Tensor | None, scaling: float, weights: Tensor | None
    ) -> None:
        """Let go what is over the policy's amount, after the attention of ``queries``.

        Args:
            queries: (B, H, q, D).
            mask: of the whole sequence, as for `own_mask`.
            own: what `own_mask` made of it.
            scaling: of the dot products.
            weights: (B, H, q, n) if the attention implementation gives them.

        Raises:
            InputError: a sequence is padded on the right.
        """
        _watch.get()()
        keys, _ = self.entries
        batch, stored = keys.shape[0], keys.shape[2]
        kind = kind_named(self.policy.kind)
        assert kind.score is not None
        visible = None if mask is None else _visible(mask, batch)
        if not kind.accumulates and visible is None and stored <= self.policy.entries(self.index, self.seen_tokens):
            return
        slots = self._slots()
        if visible is None:
            counts, valid, positions = [self.seen_tokens] * batch, None, slots
        else:
            counts = visible.sum(dim=-1).tolist()
            places = slots.clamp(min=0).flatten(1)
            valid = visible.gather(1, places).view_as(slots) & (slots >= 0)
            positions = (visible.cumsum(dim=-1) - 1).gather(1, places).view_as(slots)
        step = Step(self.index, self.policy.seed, queries, keys, positions, valid, own, scaling, weights)
        if kind.accumulates:
            total = step.received_now()
            if self.sums is not None:
                total[..., : self.sums.shape[-1]] += self.sums
            self.sums = total
            step = replace(step, total=total)
        targets = [self.policy.entries(self.index, count) for count in counts]
        held = [stored] * batch if valid is None else valid.sum(dim=-1).amax(dim=-1).tolist()
        width = max(targets)
        if stored > width or any(count > target for count, target in zip(held, targets, strict=True)):
            self._keep(self._ranked(kind.score(step), positions, valid, counts, targets), width, targets)

    def _slots(self) -> Tensor:
        if self.slots is not None:
            return self.slots.long()
        keys, _ = self.entries
        return torch.arange(self.seen_tokens, device=keys.device).expand(keys.shape[0], 1, -1)

    def _ranked(
        self, scores: Tensor, positions: Tensor, valid: Tensor | None, counts: list[int], targets: list[int]
    ) -> Tensor:
        """Entries by falling score, ties by age; protected ones first, padding last. (B, 1 or G, n)."""
        sinks = self.policy.sinks
        if sinks:
            scores = scores.masked_fill(positions < sinks, torch.inf)
        if self.policy.recent:
            reserved = [min(self.policy.newest(target), max(target - sinks, 0)) for target in targets]
            first = torch.tensor(counts, device=scores.device) - torch.tensor(reserved, device=scores.device)
            scores = scores.masked_fill(positions >= first[:, None, None], torch.inf)
        if valid is not None:
            scores = scores.masked_fill(~valid, -torch.inf)
        return scores.argsort(dim=-1, descending=True, stable=True)

    def _keep(self, ranked: Tensor, width: int, targets: list[int]) -> None:
        """Keep ``width`` entries, of which a sequence with a lower target can see only that many."""
        slots = self._slots().expand(-1, ranked.shape[1], -1)
        kept, order = ranked[..., :width].sort(dim=-1)
        self.slots = slots.gather(2, kept).to(torch.int32)
        if min(targets) < width:
            limits = torch.tensor(targets, device=order.device)[:, None, None]
            self.slots = self.slots.masked_fill(order >= limits, -1)
        keys, values = self.entries
        index = kept.expand(-1, keys.shape[1], -1)
        # gather makes new storage; a slice would keep the old one alive.
        self.keys = keys.gather(2, index[..., None].expand(-1, -1, -1, keys.shape[-1]))
        self.values = values.gather(2, index[..., None].expand(-1, -1, -1, values.shape[-1]))
        if self.sums is not None:
            self.sums = self.sums.gather(2, index)


def _visible(mask: Tensor, batch: int) -> Tensor:
    """(B, tokens seen): what the newest query sees, which is all but padding."""
    visible = seen(mask[:, 0, -1]).expand(batch, -1)
    if not visible[:, -1].all():
        raise InputError("a sequence ends in padding", hint="cache policies need padding on the left")
    return visible


def held_bytes(cache: Any) -> int:  # noqa: ANN401
    """Bytes of the storage behind a cache's keys and values, views counted once and whole."""
    return _storage(getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))


@dataclass
class Peak:
    """The most bytes of keys and values that a cache held at once so far."""

    nbytes: int = 0


@contextmanager
def measured_peak(cache: Any) -> Iterator[Peak]:  # noqa: ANN401
    """Inside the block, look at a cache whenever one of its layers is about to evict; and when the block ends."""
    peak = Peak()

    def look() -> None:
        peak.nbytes = max(peak.nbytes, held_bytes(cache))

    token = _watch.set(look)
    try:
        yield peak
    finally:
        look()
        _watch.reset(token)


def bookkeeping_bytes(cache: Any) -> int:  # noqa: ANN401
    """Bytes that the policies keep beside: which token an entry was (int32), and sums of attention."""
    layers = [layer for layer in cache.layers if isinstance(layer, EvictLayer)]
    return _storage(tensor for layer in layers for tensor in (layer.slots, layer.sums))


def held_entries(cache: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Entries that each layer stores; 0 for layers without keys."""
    return tuple(_stored(getattr(layer, "keys", None)) for layer in cache.layers)


def _stored(keys: Tensor | None) -> int:
    return keys.shape[-2] if isinstance(keys, Tensor) and keys.dim() == 4 else 0


def _storage(tensors: Iterable[Tensor | None]) -> int:
    def storages() -> Iterator[tuple[int, int]]:
        for tensor in tensors:
            if tensor is not None:
                storage = tensor.untyped_storage()
                yield storage.data_ptr(), storage.nbytes()

    return sum(dict(storages()).values())
