"""The policies a second time, from the papers: nothing is evicted, what is gone is masked.

Stock eager attention, a full stock cache, Python sets of what each KV head may still see, decisions in float64 and one
entry at a time. It shares no code with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


@dataclass
class Rule:
    """A policy as the oracle knows it."""

    kind: str
    budget: int | None = None
    ratio: float | None = None
    sinks: int = 0
    recent: float = 0

    def target(self, seen: int) -> int:
        return min(seen, self.budget) if self.budget is not None else math.ceil((self.ratio or 0) * seen)


class Oracle:
    """One sequence through a model with eager attention."""

    def __init__(self, model: Any, rule: Rule) -> None:  # noqa: ANN401
        self.model, self.rule = model, rule
        self.cache = DynamicCache(config=model.config)
        self.heads = model.config.num_attention_heads
        self.kv_heads = model.config.num_key_value_heads
        layers = model.config.num_hidden_layers
        self.alive: list[list[set[int]]] = [[set() for _ in range(self.kv_heads)] for _ in range(layers)]
        self.received: list[dict[tuple[int, int], float]] = [{} for _ in range(layers)]
        self.seen = 0

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        """Logits (1, q, vocabulary) of the next tokens; then every layer decides."""
        new = ids.shape[1]
        handles = [
            layer.self_attn.register_forward_pre_hook(self._masked(number, new), with_kwargs=True)
            for number, layer in enumerate(self.model.model.layers)
        ]
        try:
            output = self.model(ids, cache=self.cache, use_cache=True, output_attentions=True)
        finally:
            for handle in handles:
                handle.remove()
        self.seen += new
        for number, weights in enumerate(output.attentions):
            keys: Any = self.cache.layers[number].keys  # type: ignore[union-attr]
            norms = torch.linalg.vector_norm(keys[0].double(), dim=-1)
            self._decide(number, weights[0].double().tolist(), norms.tolist(), new)
        logits: Tensor = output.logits
        return logits

    def _masked(self, layer: int, new: int) -> Any:  # noqa: ANN401
        def hook(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
            mask = torch.full((1, self.heads, new, self.seen + new), torch.finfo(torch.float32).min)
            for head in range(self.heads):
                visible = sorted(self.alive[layer][head * self.kv_heads // self.heads])
                for query in range(new):
                    mask[0, head, query, [*visible, *range(self.seen, self.seen + query + 1)]] = 0
            return args, {**kwargs, "attention_mask": mask}

        return hook

    def _decide(self, layer: int, weights: list[list[list[float]]], norms: list[list[float]], new: int) -> None:
        share = self.heads // self.kv_heads
        target = self.rule.target(self.seen)
        newest = int(self.rule.recent * target) if self.rule.recent < 1 else int(self.rule.recent)
        for head in range(self.kv_heads):
            group = range(head * share, (head + 1) * share)
            alive = self.alive[layer][head]
            alive |= set(range(self.seen - new, self.seen))
            for entry in alive:
                gained = sum(weights[q][row][entry] for q in group for row in range(new))
                self.received[layer][head, entry] = self.received[layer].get((head, entry), 0.0) + gained
            value = self._value(layer, head, weights, norms)
            free = {e for e in alive if e >= self.rule.sinks and e < self.seen - newest}
            while len(alive) > target:
                worst = min(free, key=value)
                free.remove(worst)
                alive.remove(worst)

    def _value(
        self, layer: int, head: int, weights: list[list[list[float]]], norms: list[list[float]]
    ) -> Callable[[int], float]:
        share = self.heads // self.kv_heads
        values: dict[str, Callable[[int], float]] = {
            "tova": lambda e: sum(weights[q][-1][e] for q in range(self.heads)),
            "tova-head": lambda e: sum(weights[q][-1][e] for q in range(head * share, (head + 1) * share)),
            "l2": lambda e: -norms[head][e],
            "l2-high": lambda e: norms[head][e],
            "window": float,
            "h2o": lambda e: self.received[layer][head, e],
        }
        return values[self.rule.kind]
