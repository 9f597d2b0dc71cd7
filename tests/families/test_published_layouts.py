"""Layouts that only their publishers' code reads: tested against the published reshape, and against no class.

Each test builds a checkpoint from heads that it knows, converts it, and takes the result apart as the model's published
``forward`` does: InternLM2 ``(h gs d)`` with gs = 2 + queries per KV head, key and value last; ChatGLM and Qwen a split
into [query, key, value]; Baichuan ``unflatten(-1, (3, hidden))``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner, Result

from gqaconvert.cli.app import app
from tests.families.cases import tensors_of

HEADS, DIM, HIDDEN = 8, 12, 96
Heads = tuple[Tensor, Tensor, Tensor]  # query (H, D, E), key (G, D, E), value (G, D, E)


def heads_of(kv_heads: int, seed: int) -> Heads:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(n, DIM, HIDDEN, generator=generator) for n in (HEADS, kv_heads, kv_heads))
    return query, key, value


def blocks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.cat([part.flatten(0, 1) for part in (query, key, value)])


def split_blocks(weight: Tensor, kv_heads: int) -> Heads:
    query, key, value = torch.split(weight, [HEADS * DIM, kv_heads * DIM, kv_heads * DIM])
    return query.view(HEADS, DIM, -1), key.view(kv_heads, DIM, -1), value.view(kv_heads, DIM, -1)


def groups(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    kv_heads = len(key)
    by_group = query.view(kv_heads, HEADS // kv_heads, DIM, -1)
    return torch.cat([by_group, key[:, None], value[:, None]], dim=1).flatten(0, 2)


def split_groups(weight: Tensor, kv_heads: int) -> Heads:
    by_group = weight.view(kv_heads, HEADS // kv_heads + 2, DIM, -1)
    return by_group[:, :-2].reshape(HEADS, DIM, -1), by_group[:, -2], by_group[:, -1]


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def convert(tmp_path: Path, kv_heads: int, *more: str) -> Result:
    arguments = ["convert", str(tmp_path / "source"), str(tmp_path / "out"), "--kv-heads", str(kv_heads), *more]
    return CliRunner().invoke(app, arguments)


BASE = {"hidden_size": HIDDEN, "num_attention_heads": HEADS, "vocab_size": 32}


@pytest.mark.parametrize(
    ("config", "fused", "output", "join", "split", "source_heads", "changed"),
    [
        (
            {"model_type": "internlm2", "num_hidden_layers": 2, "num_key_value_heads": 8},
            "model.layers.{}.attention.wqkv.weight", "model.layers.{}.attention.wo.weight", groups, split_groups, 8,
            {"num_key_value_heads": 2},
        ),
        (
            {"model_type": "internlm2", "num_hidden_layers": 2, "num_key_value_heads": 4},
            "model.layers.{}.attention.wqkv.weight", "model.layers.{}.attention.wo.weight", groups, split_groups, 4,
            {"num_key_value_heads": 2},
        ),
        (
            {
                "model_type": "chatglm", "num_layers": 2, "multi_query_attention": True, "multi_query_group_num": 4,
                "kv_channels": DIM,
            },
            "transformer.encoder.layers.{}.self_attention.query_key_value.weight",
            "transformer.encoder.layers.{}.self_attention.dense.weight", blocks, split_blocks, 4,
            {"multi_query_group_num": 2},
        ),
    ],
    ids=["internlm2", "internlm2-grouped", "chatglm"],
)  # fmt: skip
@pytest.mark.parametrize("method", ["mean", "subspace"])
def test_heads_are_where_the_published_code_looks(
    config: dict[str, Any],
    fused: str,
    output: str,
    join: Callable[..., Tensor],
    split: Callable[[Tensor, int], Heads],
    source_heads: int,
    changed: dict[str, int],
    method: str,
    tmp_path: Path,
) -> None:
    layers = [heads_of(source_heads, seed) for seed in (1, 2)]
    tensors = {fused.format(layer): join(*heads) for layer, heads in enumerate(layers)}
    tensors |= {output.format(layer): torch.randn(HIDDEN, HEADS * DIM) for layer in (0, 1)}
    write(tmp_path / "source", BASE | config, tensors)
    result = convert(tmp_path, 2, "--method", method)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == BASE | config | changed
    found = tensors_of(tmp_path / "out")
    for layer, (query, key, value) in enumerate(layers):
        parts = split(found[fused.format(layer)], 2)
        assert parts[0].shape == query.shape
        if method != "mean":  # rotates Q: what stays is each head's inner products with its keys, tested elsewhere
            continue
        assert torch.equal(parts[0], query)
        for part, heads in ((parts[1], key), (parts[2], value)):
            expected = heads.double().view(2, source_heads // 2, DIM, HIDDEN).mean(dim=1).float()
            assert torch.equal(part, expected)
    check = CliRunner().invoke(app, ["validate", str(tmp_path / "source"), str(tmp_path / "out"), "--level", "files"])
    assert check.exit_code == 0, check.output


@pytest.mark.parametrize(
    ("config", "fused", "output"),
    [
        (
            {"model_type": "baichuan", "num_hidden_layers": 2},
            "model.layers.{}.self_attn.W_pack.weight", "model.layers.{}.self_attn.o_proj.weight",
        ),
        (
            {"model_type": "qwen", "num_hidden_layers": 2},
            "transformer.h.{}.attn.c_attn.weight", "transformer.h.{}.attn.c_proj.weight",
        ),
    ],
    ids=["baichuan", "qwen"],
)  # fmt: skip
def test_without_a_setting_only_expanded(config: dict[str, Any], fused: str, output: str, tmp_path: Path) -> None:
    layers = [heads_of(8, seed) for seed in (1, 2)]
    tensors = {fused.format(layer): blocks(*heads) for layer, heads in enumerate(layers)}
    tensors |= {output.format(layer): torch.randn(HIDDEN, HEADS * DIM) for layer in (0, 1)}
    write(tmp_path / "source", BASE | config, tensors)
    refused = convert(tmp_path, 2)
    assert refused.exit_code == 2
    assert "no setting for fewer KV heads" in refused.stderr
    assert "--expanded" in refused.stderr
    assert convert(tmp_path, 2, "--expanded").exit_code == 0
    found = tensors_of(tmp_path / "out")
    for layer, (query, key, value) in enumerate(layers):
        packed = found[fused.format(layer)].view(3, HEADS, DIM, HIDDEN)
        assert torch.equal(packed[0], query)
        for part, heads in ((packed[1], key), (packed[2], value)):
            expected = heads.double().view(2, 4, DIM, HIDDEN).mean(dim=1).float().repeat_interleave(4, dim=0)
            assert torch.equal(part, expected)
    inspected = CliRunner().invoke(app, ["inspect", str(tmp_path / "source")])
    assert "cannot be converted" in inspected.stdout
