"""`gqaconvert inspect`: facts against the stock library's, counts against a closed form, problems one by one."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.support.checkpoints import llama_checkpoint, write_raw_safetensors, write_safetensors
from tests.support.runs import (
    INDEX,
    SINGLE,
    convert,
    edit_config,
    edit_tensors,
    fails,
    invoke,
    process,
    read_json,
    read_raw,
    read_tensors,
    write_json,
)


def facts(source: Path, *options: object) -> dict[str, Any]:
    result = invoke("inspect", source, "--json", *options)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert isinstance(document, dict)
    return document


def problems(source: Path, *options: object) -> dict[str, dict[str, Any]]:
    return {problem["code"]: problem for problem in facts(source, *options)["problems"]}


# ---- Facts

TINY: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 6,
    "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
STOCK: dict[str, tuple[Any, Any, str]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**TINY, num_key_value_heads=6), "MHA"),
    "llama-gqa-wide": (LlamaForCausalLM, LlamaConfig(**TINY, num_key_value_heads=2, head_dim=16), "GQA"),
    "llama-biases": (LlamaForCausalLM, LlamaConfig(**TINY, num_key_value_heads=6, attention_bias=True), "MHA"),
    "mistral-mqa": (
        MistralForCausalLM,
        MistralConfig(**TINY, num_key_value_heads=1, head_dim=8, sliding_window=77, tie_word_embeddings=True),
        "MQA",
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**TINY, num_key_value_heads=3), "GQA"),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**TINY, num_key_value_heads=3, head_dim=8), "GQA"),
    "phi3": (Phi3ForCausalLM, Phi3Config(**TINY, num_key_value_heads=3), "GQA"),
}


@pytest.mark.parametrize("name", STOCK)
def test_facts_are_those_of_the_stock_library(tmp_path: Path, name: str) -> None:
    model_class, config, kind = STOCK[name]
    model = model_class(config)
    model.save_pretrained(tmp_path / "source", max_shard_size="30KB")
    found = facts(tmp_path / "source")
    stock: Any = AutoConfig.from_pretrained(tmp_path / "source")
    heads, kv_heads = stock.num_attention_heads, stock.num_key_value_heads
    head_dim = getattr(stock, "head_dim", None) or stock.hidden_size // heads
    assert found["model_type"] == stock.model_type
    assert found["attention"] == kind
    assert found["num_hidden_layers"] == stock.num_hidden_layers
    assert found["num_attention_heads"] == heads
    assert found["num_key_value_heads"] == kv_heads
    assert found["head_dim"] == found["value_head_dim"] == head_dim
    assert found["tied_embeddings"] == bool(stock.tie_word_embeddings)
    assert found["parameters"] == sum(parameter.numel() for parameter in set(model.parameters()))
    assert found["total_bytes"] == 4 * found["parameters"]
    assert found["dtypes"] == {"F32": found["total_bytes"]}
    files = {path.name: path.stat().st_size for path in (tmp_path / "source").glob("*.safetensors")}
    assert found["shards"] == files
    assert len(files) > 1
    attention = model.model.layers[0].self_attn
    assert set(found["projections"]) == {
        child for child, module in attention.named_children() if isinstance(module, torch.nn.Linear)
    }
    with_bias = {child for child, module in attention.named_children() if getattr(module, "bias", None) is not None}
    assert set(found["biases"]) == with_bias
    assert set(found["norms"]) == {child for child, _ in attention.named_children() if "norm" in child}
    assert found["layout"] == ("fused, blocks" if name == "phi3" else "separate")
    assert found["sliding_window"] == (77 if "mistral" in name else None)
    assert found["problems"] == []
    assert found["convertible"] is True
    assert found["reason"] is None


def test_the_cache_is_what_the_stock_library_allocates(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", heads=6, kv_heads=3, head_dim=8)
    model: Any = AutoModelForCausalLM.from_pretrained(source)
    tokens = 5
    with torch.inference_mode():
        cache = model(torch.arange(tokens)[None], use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    (current,) = [option for option in facts(source)["kv_heads"] if option["current"]]
    assert current["cache_bytes_per_token"] * tokens == held


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 12), (12, 6), (12, 4), (7, 7), (16, 2), (1, 1), (6, 1)])
def test_counts_and_tensor_parallel_sizes(tmp_path: Path, heads: int, kv_heads: int) -> None:
    source = llama_checkpoint(
        tmp_path / "source", heads=heads, kv_heads=kv_heads, head_dim=4, layers=2, dtype=torch.bfloat16
    )
    options = {option["num_key_value_heads"]: option for option in facts(source)["kv_heads"]}
    assert list(options) == [
        count for count in range(1, heads + 1) if heads % count == 0 and math.gcd(count, kv_heads) in (count, kv_heads)
    ]
    for count, option in options.items():
        assert option["queries_per_kv"] * count == heads
        assert option["cache_bytes_per_token"] == 2 * 2 * count * 4 * 2  # layers, K and V, heads, head_dim, bytes
        assert option["current"] == (count == kv_heads)
        powers = [2**power for power in range(7)]
        even = [size for size in powers if heads % size == 0]
        assert option["tensor_parallel"] == [size for size in even if count % size == 0]
        assert option["tensor_parallel_replicated"] == [size for size in even if size > count and size % count == 0]


def test_no_count_in_the_config_means_the_weights_decide(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source")
    edit_config(source, "num_key_value_heads", "head_dim")
    found = facts(source)
    assert (found["num_key_value_heads"], found["head_dim"], found["attention"]) == (6, 8, "MHA")


def test_a_nested_config(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", kv_heads=2)
    config = read_json(source / "config.json")
    write_json(source / "config.json", {"model_type": "wrapper", "text_config": config})
    assert facts(source)["num_key_value_heads"] == 2


def test_an_output_tells_where_it_came_from(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source")
    target = convert(source, tmp_path / "target", "--kv-heads", 2)
    found = facts(target)
    assert found["provenance"] == read_json(target / "gqaconvert.json")
    assert found["problems"] == []
    shown = invoke("inspect", target).stdout
    assert "made by" in shown
    assert "6 KV heads" in shown


def test_an_unknown_type_is_described_as_far_as_it_goes(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source")
    edit_config(source, model_type="lllama")
    found = facts(source)
    assert found["family"] is None
    assert found["convertible"] is False
    assert "lllama" in found["reason"]
    assert found["parameters"] > 0
    message = fails(2, "convert", source, tmp_path / "target", "--mqa")
    assert "llama" in message.replace("lllama", "")
    assert facts(source, "--family", "llama")["convertible"] is True
    convert(source, tmp_path / "target", "--mqa", "--family", "llama")


# ---- Problems


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return llama_checkpoint(tmp_path / "source", shards=3)


def refused(source: Path) -> None:
    """An error forbids a conversion, and --check says so."""
    fails(2, "convert", source, source.parent / "target", "--mqa")
    assert not (source.parent / "target").exists()
    assert invoke("inspect", source, "--check").exit_code == 1
    assert facts(source)["convertible"] is False


def harmless(source: Path) -> None:
    """A warning forbids nothing."""
    assert invoke("inspect", source, "--check").exit_code == 0
    convert(source, source.parent / "target", "--mqa")


def test_a_sound_checkpoint_has_no_problems(sharded: Path) -> None:
    assert problems(sharded) == {}
    assert invoke("inspect", sharded, "--check").exit_code == 0


def test_missing_shard(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    found = problems(sharded)["missing-shard"]
    assert found["severity"] == "error"
    assert "model-00002-of-00003.safetensors" in found["message"]
    refused(sharded)


def test_all_shards_missing(sharded: Path) -> None:
    for path in sharded.glob("*.safetensors"):
        path.unlink()
    fails(2, "inspect", sharded)


def test_stray_shard(sharded: Path) -> None:
    write_safetensors(sharded / "extra.safetensors", {"x": torch.zeros(1)})
    found = problems(sharded)["stray-weights"]
    assert found["severity"] == "warning"
    assert "extra.safetensors" in found["message"]
    harmless(sharded)
    assert not (sharded.parent / "target" / "extra.safetensors").exists()


@pytest.mark.parametrize("size", [0, 12345, -1, "many", 1.5])
def test_wrong_total_size(sharded: Path, size: object) -> None:
    index = read_json(sharded / INDEX)
    true_size = index["metadata"]["total_size"]
    write_json(sharded / INDEX, index | {"metadata": {"total_size": size}})
    found = problems(sharded)["total-size"]
    assert found["severity"] == "warning"
    assert str(true_size) in found["message"]
    harmless(sharded)
    kept = sum(
        len(raw.data)
        for path in (sharded.parent / "target").glob("*.safetensors")
        for raw in read_raw(path)[0].values()
    )
    assert read_json(sharded.parent / "target" / INDEX)["metadata"]["total_size"] == kept


def test_tensor_in_another_shard_than_the_index_says(sharded: Path) -> None:
    index = read_json(sharded / INDEX)
    name = "model.layers.0.mlp.up_proj.weight"
    others = set(index["weight_map"].values()) - {index["weight_map"][name]}
    index["weight_map"][name] = min(others)
    write_json(sharded / INDEX, index)
    found = problems(sharded)["wrong-shard"]
    assert found["severity"] == "error"
    assert name in found["message"]
    refused(sharded)


def test_tensor_in_no_shard(sharded: Path) -> None:
    index = read_json(sharded / INDEX)
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00003.safetensors"
    write_json(sharded / INDEX, index)
    found = problems(sharded)["missing-tensor"]
    assert found["severity"] == "error"
    assert "model.ghost.weight" in found["message"]
    refused(sharded)


def test_tensor_that_the_index_does_not_name(sharded: Path) -> None:
    index = read_json(sharded / INDEX)
    del index["weight_map"]["model.norm.weight"]
    write_json(sharded / INDEX, index)
    found = problems(sharded)["unlisted-tensor"]
    assert found["severity"] == "warning"
    assert "model.norm.weight" in found["message"]


def test_tensor_stored_twice(sharded: Path) -> None:
    first, second = (sharded / f"model-0000{number}-of-00003.safetensors" for number in (1, 2))
    tensors, _ = read_raw(first)
    name = next(iter(tensors))
    both = {key: torch.zeros(raw.shape) for key, raw in read_raw(second)[0].items()}
    write_safetensors(second, both | {name: torch.zeros(tensors[name].shape)})
    found = problems(sharded)["duplicate-tensor"]
    assert found["severity"] == "error"
    assert found["subject"] == name
    refused(sharded)


def test_missing_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert problems(sharded)["no-index"]["severity"] == "warning"
    harmless(sharded)


def test_missing_index_and_shard(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    (sharded / "model-00002-of-00003.safetensors").unlink()
    fails(2, "inspect", sharded)


def test_cut_off_shard(sharded: Path) -> None:
    path = sharded / "model-00003-of-00003.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    found = problems(sharded)["bad-shard"]
    assert found["severity"] == "error"
    assert found["subject"] == path.name
    refused(sharded)


def test_single_file_beside_an_index(sharded: Path) -> None:
    other = llama_checkpoint(sharded.parent / "other")
    (other / SINGLE).rename(sharded / SINGLE)
    assert problems(sharded)["two-sources"]["severity"] == "warning"


def test_single_file_under_another_name(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source")
    (source / SINGLE).rename(source / "weights.safetensors")
    assert problems(source)["file-name"]["severity"] == "warning"
    harmless(source)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 5), ("num_attention_heads", 3), ("num_key_value_heads", 2), ("head_dim", 16),
        ("num_hidden_layers", 3), ("num_hidden_layers", 1), ("num_attention_heads", 10**30),
        ("num_attention_heads", "6"), ("num_attention_heads", 6.0), ("num_attention_heads", True),
        ("num_attention_heads", -6), ("num_attention_heads", None), ("num_hidden_layers", [2]),
        ("num_key_value_heads", 0), ("head_dim", 0),
    ],
)  # fmt: skip
def test_config_against_shapes(tmp_path: Path, key: str, value: object) -> None:
    source = llama_checkpoint(tmp_path / "source", layers=2)
    edit_config(source, **{key: value})
    assert problems(source)["attention"]["severity"] == "error"
    refused(source)


def test_missing_layer(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", layers=3)
    kept = {name: tensor for name, tensor in read_tensors(source).items() if "layers.1." not in name}
    write_safetensors(source / SINGLE, kept)
    found = problems(source)["attention"]
    assert "3 layers" in found["message"]
    assert "layer 1" in found["message"]
    refused(source)


@pytest.mark.parametrize("name", ["k_proj", "v_proj", "q_proj", "o_proj"])
def test_missing_projection(tmp_path: Path, name: str) -> None:
    source = llama_checkpoint(tmp_path / "source", layers=2)
    kept = {
        key: tensor for key, tensor in read_tensors(source).items() if key != f"model.layers.1.self_attn.{name}.weight"
    }
    write_safetensors(source / SINGLE, kept)
    assert "layers.1" in problems(source)["attention"]["message"]
    refused(source)


def test_unknown_tensor_in_the_attention(tmp_path: Path) -> None:
    """A head-wise tensor that nobody knows of must not be carried unchanged."""
    source = llama_checkpoint(tmp_path / "source")
    edit_tensors(source, {"model.layers.0.self_attn.k_gate.weight": torch.zeros(6)})
    assert "k_gate" in problems(source)["attention"]["message"]
    refused(source)


def test_adapter_config_beside_weights(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", extra_sidecars={"adapter_config.json": "{}"})
    assert problems(source)["adapter-config"]["severity"] == "warning"
    harmless(source)


def test_empty_tensor(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source")
    edit_tensors(source, {"model.placeholder": torch.zeros((0, 3))})
    found = problems(source)["empty-tensor"]
    assert found["severity"] == "warning"
    assert found["subject"] == "model.placeholder"


# ---- --check


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_check_finds_what_is_not_finite(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    source = llama_checkpoint(tmp_path / "source")
    tensors = {name: tensor.to(dtype) for name, tensor in read_tensors(source).items()}
    tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[[0, -1]] = value
    tensors["model.norm.weight"][3] = value
    write_safetensors(source / SINGLE, tensors)
    assert problems(source) == {}, "without --check only headers are read"
    result = invoke("inspect", source, "--check", "--json")
    assert result.exit_code == 1
    found = [problem for problem in json.loads(result.stdout)["problems"] if problem["code"] == "not-finite"]
    assert {problem["subject"] for problem in found} == {"model.layers.1.mlp.up_proj.weight", "model.norm.weight"}
    assert [problem["message"].split()[0] for problem in sorted(found, key=lambda p: str(p["subject"]))] == ["2", "1"]


def test_check_passes_over_types_without_numbers(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source")
    edit_tensors(source, {"model.ids": torch.arange(9), "model.mask": torch.ones(3, dtype=torch.bool)})
    assert invoke("inspect", source, "--check").exit_code == 0


# ---- Hostile files


@pytest.mark.parametrize(
    "damage",
    [
        "../other/model.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".hidden.safetensors", "model.bin",
        "a\\b.safetensors", "x\0.safetensors", "", 5, None,
    ],
)  # fmt: skip
def test_an_index_with_paths_is_refused(sharded: Path, damage: object) -> None:
    index = read_json(sharded / INDEX)
    index["weight_map"]["model.norm.weight"] = damage
    write_json(sharded / INDEX, index)
    fails(2, "inspect", sharded)
    fails(2, "convert", sharded, sharded.parent / "target", "--mqa")


@pytest.mark.parametrize(
    "index",
    ["[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", "[" * 100_000, '{"metadata": 3, "weight_map": 4}'],
)
def test_an_index_that_is_none_is_refused(sharded: Path, index: str) -> None:
    (sharded / INDEX).write_text(index)
    assert INDEX in fails(2, "inspect", sharded)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff", '{"model_type": ["llama"]}', "null"])
def test_a_config_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    source = llama_checkpoint(tmp_path / "source")
    (source / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in fails(2, "convert", source, tmp_path / "target", "--mqa")
    assert invoke("inspect", source).exit_code in (0, 2)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 10_000, 1, 0])
def test_a_header_of_an_absurd_length_is_refused(tmp_path: Path, length: int) -> None:
    source = llama_checkpoint(tmp_path / "source")
    write_raw_safetensors(source / SINGLE, b"{}", header_length=length)
    assert SINGLE in fails(2, "inspect", source)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        {"a": ENTRY | {"data_offsets": [0, 4]}}, {"a": ENTRY | {"data_offsets": [8, 0]}},
        {"a": ENTRY | {"data_offsets": [-8, 0]}}, {"a": ENTRY | {"data_offsets": [4, 12]}},
        {"a": ENTRY | {"shape": [-2]}}, {"a": ENTRY | {"shape": [2.0]}}, {"a": ENTRY | {"shape": [True, 2]}},
        {"a": ENTRY | {"shape": "2"}}, {"a": ENTRY | {"shape": [10**400, 10**400]}}, {"a": ENTRY | {"dtype": "F31"}},
        {"a": ENTRY | {"dtype": ["F32"]}}, {"a": ENTRY, "b": ENTRY}, {"a": None}, {"a": []}, [], "text", {"a": {}},
        {"__metadata__": {"format": 5}, "a": ENTRY}, {"__metadata__": [], "a": ENTRY}, b"[" * 100_000,
        b"\xff\xff", b"{" * 8,
    ],
    ids=str,
)  # fmt: skip
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, header: Any) -> None:  # noqa: ANN401
    source = llama_checkpoint(tmp_path / "source")
    write_raw_safetensors(source / SINGLE, header, bytes(8))
    message = fails(2, "inspect", source)
    assert SINGLE in message
    assert len(message) < 2000


def pickled(*, zipped: bool) -> bytes:
    """Weights as torch saves them."""
    buffer = io.BytesIO()
    torch.save({"x": torch.zeros(3)}, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "word"),
    [
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("model.safetensors", b"GGUF\x03\0\0\0\0\0\0\0", "GGUF"),
        ("model.safetensors", pickled(zipped=True), "pickle"),
        ("model.safetensors", pickled(zipped=False), "pickle"),
        ("pytorch_model.bin", b"PK\x03\x04", "save_pretrained"),
        ("model.gguf", b"GGUF", "GGUF"),
        ("adapter_model.safetensors", b"\x02\0\0\0\0\0\0\0{}", "safetensors"),
        ("consolidated.00.pth", b"PK", "Meta"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", b"PK", "zero_to_fp32"),
        ("__0_0.distcp", b"x", "FSDP"),
        ("tf_model.h5", b"x", "framework"),
    ],
)
def test_other_formats_are_named_with_what_to_do(tmp_path: Path, name: str, content: bytes, word: str) -> None:
    source = llama_checkpoint(tmp_path / "source")
    (source / SINGLE).unlink()
    (source / name).write_bytes(content)
    for command in (("inspect", source), ("convert", source, tmp_path / "target", "--mqa")):
        assert word in fails(2, *command)


def test_control_characters_in_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source")
    evil = "\x1b]0;owned\x07[bold]x[/bold]\x1b[2J"
    edit_tensors(source, {f"model.layers.0.self_attn.{evil}.weight": torch.zeros(1)})
    edit_config(source, model_type=evil)
    for command in (("inspect", source), ("inspect", source, "--family", "llama")):
        assert "\x1b" not in invoke(*command).stdout
    message = invoke("convert", source, tmp_path / "target", "--mqa").stderr
    message += invoke("convert", source, tmp_path / "target", "--mqa", "--family", "llama").stderr
    assert "\x1b" not in message


# ---- Output


def test_quiet_says_nothing(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source")
    done = process("inspect", source, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_table_shows_heads_and_counts(tmp_path: Path) -> None:
    shown = invoke("inspect", llama_checkpoint(tmp_path / "source", kv_heads=3)).stdout
    for words in ("GQA: 6 query heads, 3 KV heads, head_dim 8", "3 (now)", "can be converted", "llama"):
        assert words in shown


def test_inspect_writes_nothing(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    invoke("inspect", source, "--check")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
