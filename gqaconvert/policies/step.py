"""What a policy may look at when it decides: one layer after the attention of one forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_BLOCK = 2**20
"""Elements of a float32 intermediate: 4 MiB, so that scoring adds next to nothing to a prefill's peak."""


@dataclass(frozen=True)
class Step:
    """One layer, whose queries have just seen its entries. B sequences, H query heads, G KV heads, n entries.

    Attributes:
        layer: its number.
        seed: of the policy.
        queries: (B, H, q, D) after rotary embedding and norms: those of this pass, the newest last.
        keys: (B, G, n, D) as stored, those of this pass included.
        positions: (B, 1 or G, n), int64: of the entries' tokens in their sequence, padding not counted.
        valid: (B, 1 or G, n): False for padding; None if there is none.
        mask: (B or 1, 1 or H, q, n) that this attention had, boolean or to be added; None: causal, or a single query.
        scaling: of the dot products.
        weights: (B, H, q, n) if the attention implementation gives its weights.
        total: (B, G, n) sums of attention so far, float32, this pass included; None unless the policy accumulates.
    """

    layer: int
    seed: int
    queries: Tensor
    keys: Tensor
    positions: Tensor
    valid: Tensor | None
    mask: Tensor | None
    scaling: float
    weights: Tensor | None
    total: Tensor | None = None

    @property
    def heads(self) -> Tensor:
        """Numbers of the KV heads, (G, 1): broadcasts against `positions`."""
        return torch.arange(self.keys.shape[1], device=self.keys.device)[:, None]

    def key_norms(self) -> Tensor:
        """L2 norms of the keys, (B, G, n), in float32: in bfloat16 most of them would tie."""
        norms: Tensor = torch.linalg.vector_norm(self.keys, dim=-1, dtype=torch.float32)
        return norms

    def attention(self) -> Tensor:
        """Softmax weights of the newest query, (B, G, H / G, n), float32."""
        groups = (self.keys.shape[0], self.keys.shape[1], -1)
        if self.weights is not None:
            return self.weights[:, :, -1].float().view(*groups, self.keys.shape[2])
        query = self.queries[:, :, -1].float().view(*groups, self.keys.shape[3]) * self.scaling
        rows = max(1, _BLOCK // max(1, self.keys[:, :, 0].numel()))
        # Block by block, because a 16-bit cache becomes float32 on the way.
        logits = torch.cat([query @ block.float().mT for block in torch.split(self.keys, rows, dim=2)], dim=-1)
        if self.valid is not None:
            logits = logits.masked_fill(~self.valid[:, :, None], -torch.inf)
        return logits.softmax(dim=-1)

    def received(self) -> Tensor:
        """Attention that each entry got from all queries so far, summed over the group's query heads, (B, G, n)."""
        assert self.total is not None
        return self.total

    def received_now(self) -> Tensor:
        """The part of `received` that came in this pass. The weights are computed again, a few rows at a time."""
        batch, kv_heads, entries, width = self.keys.shape
        count = self.queries.shape[2]
        if self.weights is not None:
            return self.weights.float().sum(dim=2).view(batch, kv_heads, -1, entries).sum(dim=2)
        queries = self.queries.view(batch, kv_heads, -1, count, width)
        keys = self.keys.float().mT
        columns = torch.arange(entries, device=keys.device)
        total = torch.zeros(batch, kv_heads, entries, device=keys.device)
        rows = max(1, _BLOCK // (batch * self.queries.shape[1] * entries))
        for start in range(0, count, rows):
            block = queries[..., start : start + rows, :].float() * self.scaling
            logits = (block.flatten(2, 3) @ keys).view(*block.shape[:-1], entries)
            if self.mask is not None:
                allowed = seen(self.mask[:, :, start : start + rows])
                shape = (allowed.shape[0], 1, 1) if allowed.shape[1] == 1 else (allowed.shape[0], kv_heads, -1)
                logits.masked_fill_(~allowed.view(*shape, *allowed.shape[2:]), -torch.inf)
            elif count > 1:
                last = torch.arange(start, start + block.shape[-2], device=keys.device) + entries - count
                logits.masked_fill_(columns > last[:, None], -torch.inf)
            # Softmax in place. A query of padding may see nothing at all.
            logits.sub_(logits.amax(dim=-1, keepdim=True)).exp_()
            logits.div_(logits.sum(dim=-1, keepdim=True)).nan_to_num_(0)
            total += logits.sum(dim=(2, 3))
        return total


def seen(mask: Tensor) -> Tensor:
    """A boolean mask from a boolean one or one that is added to the logits."""
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
