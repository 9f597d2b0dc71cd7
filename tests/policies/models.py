"""Tiny models and loops that the tests of the policies share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from gqaconvert.policies.apply import apply_policy, make_cache
from gqaconvert.policies.spec import KVPolicy

VOCABULARY = 256
TINY = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "head_dim": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
EVICTING = ("tova", "tova-head", "l2:skip=", "l2-high:skip=", "window", "window+sinks", "h2o", "random")


def tiny(model_type: str = "llama", implementation: str = "sdpa", seed: int = 0, **overrides: Any) -> PreTrainedModel:  # noqa: ANN401
    """A random model whose attention is far from uniform, in float32."""
    config = AutoConfig.for_model(model_type, **{**TINY, **overrides})
    torch.manual_seed(seed)
    auto: Any = AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(config, dtype=torch.float32, attn_implementation=implementation).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(
                    torch.randn(parameter.shape) * (2.0 if "q_proj" in name else 1.0) * parameter.shape[-1] ** -0.5
                )
            elif "norm" in name:
                parameter.copy_(0.5 + torch.rand(parameter.shape))
    return model


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    """No token twice in a sequence: in the first layer, the key norms of equal tokens tie."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([1 + torch.randperm(VOCABULARY - 1, generator=generator)[:length] for _ in range(batch)])


@torch.no_grad()
def in_chunks(model: Any, ids: Tensor, policy: KVPolicy, chunk: int, mask: Tensor | None = None) -> tuple[Tensor, Any]:  # noqa: ANN401
    """Logits of all tokens, fed so many at a time, and the cache that is left."""
    cache = make_cache(model, policy)
    logits = []
    with apply_policy(model, policy):
        for start in range(0, ids.shape[1], chunk):
            stop = start + chunk
            given = {} if mask is None else {"attention_mask": mask[:, :stop]}
            logits.append(model(ids[:, start:stop], cache=cache, use_cache=True, **given).logits)
    return torch.cat(logits, dim=1), cache


def kept(cache: Any, layer: int, row: int = 0) -> list[list[int]]:  # noqa: ANN401
    """Tokens that each KV head of a layer still holds, ascending."""
    held = cache.layers[layer]
    heads = held.keys.shape[1]
    if getattr(held, "slots", None) is None:
        return [list(range(held.keys.shape[2]))] * heads
    return [sorted(slot for slot in head if slot >= 0) for head in held.slots[row].expand(heads, -1).tolist()]
