"""Stock transformers classes with fewer KV heads than their code has a setting for.

The stock ``forward`` runs as it is. Two things around it change:

* The projections of K and V have G heads, as many as config.json says. Their result is repeated to the H heads
  that the stock code reshapes.
* The cache that the attention module sees keeps one head of each group and hands out H.

So the weights and the cache hold G heads, and what is computed is what the stock class computes with each group's
heads made equal. Where the config has no such number, these are the stock classes.
"""

import copy
import re
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, EncoderDecoderCache


class SharedHeads(Cache):
    """A cache as one attention module sees it: H heads, of which the real one holds every ``share``-th.

    Attributes:
        stored: the real cache.
        share: query heads per KV head, H / G.
    """

    def __init__(self, stored: Cache, share: int) -> None:  # the real cache is initialised already
        self.stored = stored
        self.share = share

    @property
    def layers(self) -> list["RepeatedLayer"]:  # type: ignore[override]
        """The layers, each with H heads; cross-attention reads them without an update."""
        return [RepeatedLayer(layer, self.share) for layer in self.stored.layers]

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[Tensor, Tensor]:
        """Store one head of each group of new keys and values, (B, H, T, D); return all that are stored, repeated."""
        states = (key_states[:, :: self.share].contiguous(), value_states[:, :: self.share].contiguous())
        keys, values = self.stored.update(*states, *args, **kwargs)
        return keys.repeat_interleave(self.share, dim=1), values.repeat_interleave(self.share, dim=1)

    def get_seq_length(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Tokens that are stored."""
        return self.stored.get_seq_length(*args, **kwargs)

    def __len__(self) -> int:
        return len(self.stored)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self.stored, name)


class RepeatedLayer:
    """Keys and values of one layer, (B, H, T, D)."""

    def __init__(self, stored: Any, share: int) -> None:  # noqa: ANN401
        self._stored, self._share = stored, share

    @property
    def keys(self) -> Tensor:
        """The stored keys, repeated."""
        keys: Tensor = self._stored.keys
        return keys.repeat_interleave(self._share, dim=1)

    @property
    def values(self) -> Tensor:
        """The stored values, repeated."""
        values: Tensor = self._stored.values
        return values.repeat_interleave(self._share, dim=1)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        return getattr(self._stored, name)


def seen(value: Any, share: int) -> Any:  # noqa: ANN401
    """An argument of an attention module as that module should see it; all but caches as they are."""
    if isinstance(value, EncoderDecoderCache):
        view: Any = copy.copy(value)  # with the same record of what is filled
        view.self_attention_cache = SharedHeads(value.self_attention_cache, share)
        view.cross_attention_cache = SharedHeads(value.cross_attention_cache, share)
        return view
    return SharedHeads(value, share) if isinstance(value, Cache) and not isinstance(value, SharedHeads) else value


def original(value: Any) -> Any:  # noqa: ANN401
    """The real cache behind a view that an attention module returns; all else as it is."""
    if isinstance(value, EncoderDecoderCache) and isinstance(value.self_attention_cache, SharedHeads):
        view: Any = copy.copy(value)
        view.self_attention_cache = view.self_attention_cache.stored
        view.cross_attention_cache = view.cross_attention_cache.stored
        return view
    return value.stored if isinstance(value, SharedHeads) else value


class SharedProjection(nn.Linear):
    """A projection that holds G heads where the stock one holds H, and gives what the stock code takes apart.

    Rows of its weight and bias, by ``arrangement``: "separate": G heads of K or of V; "blocks": H query heads, G key
    heads, G value heads; "groups": for each KV head its H / G query heads, its key head, its value head.
    """

    def __init__(self, stock: Any, heads: int, kv_heads: int, arrangement: str) -> None:  # noqa: ANN401
        """Take the place of a stock projection; of each group, the first head is kept."""
        weight, bias = stock.weight, stock.bias
        if not isinstance(stock, nn.Linear):  # GPT-2's Conv1D: (in, out)
            weight = weight.t()
        rows = torch.arange(weight.shape[0])
        share = heads // kv_heads
        if arrangement == "separate":
            kept = rows.view(kv_heads, share, -1)[:, 0].flatten()
        elif arrangement == "blocks":
            query, key, value = rows.view(3, heads, -1)
            kept = torch.cat([query.flatten(), key[::share].flatten(), value[::share].flatten()])
        else:
            by_head = rows.view(kv_heads, share, 3, -1)
            kept = torch.cat([by_head[:, :, 0].flatten(1), by_head[:, 0, 1], by_head[:, 0, 2]], dim=1).flatten()
        super().__init__(weight.shape[1], len(kept), bias is not None, weight.device, weight.dtype)
        self.heads, self.kv_heads, self.arrangement = heads, kv_heads, arrangement
        with torch.no_grad():
            self.weight.copy_(weight[kept.to(weight.device)])
            if bias is not None:
                self.bias.copy_(bias[kept.to(bias.device)])

    def forward(self, states: Tensor) -> Tensor:
        """(..., in) -> (..., what the stock projection gives)."""
        projected = super().forward(states)
        heads, kv_heads = self.heads, self.kv_heads
        share = heads // kv_heads
        if self.arrangement == "separate":
            return _cut(projected, kv_heads).repeat_interleave(share, dim=-2).flatten(-2)
        if self.arrangement == "blocks":
            by_head = _cut(projected, heads + 2 * kv_heads)
            query, pairs = by_head[..., :heads, :], by_head[..., heads:, :]
            return torch.cat([query, pairs.repeat_interleave(share, dim=-2)], dim=-2).flatten(-2)
        by_group = _cut(projected, kv_heads, share + 2)
        query = by_group[..., :share, :]
        key, value = (by_group[..., n : n + 1, :].expand_as(query) for n in (share, share + 1))
        return torch.stack([query, key, value], dim=-2).flatten(-4)


def _cut(states: Tensor, *sizes: int) -> Tensor:
    """(..., n) -> (..., *sizes, n / product of sizes)."""
    return states.reshape(*states.shape[:-1], *sizes, -1)


class GroupedQueryMixin:
    """Goes before a stock class among the bases of a class.

    Attributes:
        attention_modules: pattern of the names of the modules that share heads.
        projections: names inside them -> their arrangement.
        heads_key: the config's name of the number of query heads.
        kv_heads_key: the config's name of the number of KV heads.
    """

    attention_modules: ClassVar[str]
    projections: ClassVar[dict[str, str]]
    heads_key: ClassVar[str]
    kv_heads_key: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init_subclass__(**kwargs)
        _rename_as(cls.__mro__[2].__name__, cls.__name__)

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(config, *args, **kwargs)  # type: ignore[call-arg]
        heads = getattr(config, self.heads_key)
        kv_heads = getattr(config, self.kv_heads_key, None) or heads
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads cannot share {kv_heads} KV heads")
        if kv_heads == heads:
            return
        assert isinstance(self, nn.Module)
        found = [module for name, module in self.named_modules() if re.fullmatch(self.attention_modules, name)]
        for module in found:
            for name, arrangement in self.projections.items():
                setattr(module, name, SharedProjection(getattr(module, name), heads, kv_heads, arrangement))
            share_heads(module, heads // kv_heads)


def _rename_as(stock: str, name: str) -> None:
    """Where files and modules differ in their names, transformers looks the renaming up by the class."""
    try:
        from transformers import conversion_mapping

        renamings: Any = conversion_mapping
        if (found := renamings.get_checkpoint_conversion_mapping(stock)) is not None:
            renamings.register_checkpoint_conversion_mapping(name, found, overwrite=True)
    except (ImportError, AttributeError):  # versions that rename nothing, or elsewhere
        return


def share_heads(module: nn.Module, share: int) -> None:
    """Let an attention module store one head in ``share``."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return tuple(seen(arg, share) for arg in args), {name: seen(value, share) for name, value in kwargs.items()}

    def after(_: nn.Module, __: Any, output: Any) -> Any:  # noqa: ANN401
        return tuple(original(value) for value in output) if isinstance(output, tuple) else output

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
