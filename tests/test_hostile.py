"""Hostile and foreign input: a clear error line, the right exit code, quickly, and nothing written but DST."""

import json
import math
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.checkpoints import llama_checkpoint, write_raw_safetensors, write_safetensors
from tests.support.runs import (
    INDEX,
    SINGLE,
    edit_config,
    edit_tensors,
    fails,
    invoke,
    listing,
    process,
    read_json,
    read_tensors,
    write_json,
)

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
CONFIG = "config.json"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return llama_checkpoint(tmp_path / "source")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return llama_checkpoint(tmp_path / "source", shards=2)


def one_line_each(message: str) -> None:
    """An error line, at most one hint, and no character that a terminal would obey."""
    lines = message.removesuffix("\n").split("\n")
    assert [line.partition(":")[0] for line in lines] in (["error"], ["error", "hint"]), message
    assert len(message) < 5000
    assert all(line.isprintable() for line in lines), repr(message)


def refused(source: Path, *words: str, exit_code: int = 2, options: tuple[object, ...] = ()) -> str:
    """Conversion fails with these words, in at most 10 s of CPU, and changes nothing anywhere; inspect survives."""
    root = source.parent
    before = listing(root)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    message = fails(exit_code, "convert", source, root / "target", "--mqa", *options)
    inspected = invoke("inspect", source, *(option for option in options if option in ("--family", "llama")))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - used < 10
    assert listing(root) == before
    one_line_each(message)
    assert inspected.exit_code in (0, exit_code)
    assert all(line.isprintable() for line in (inspected.stdout + inspected.stderr).split("\n"))
    for word in words:
        assert word in message, message
    return message


# ---- Headers


def padded(depth: int) -> bytes:
    return b'{"a":{"dtype":"F32","shape":' + b"[" * depth + b"]" * depth + b',"data_offsets":[0,8]}}'


HEADERS: dict[str, Any] = {
    "NaN": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}',
    "infinity": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,Infinity]}}',
    "nested deeply": padded(900),
    "nested too deeply": padded(100_000),
    "two entries, one name": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    "half a surrogate pair": b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "UTF-16": '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.encode("utf-16"),
    "a hole at the start": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},
    "a hole": {
        "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "b": {"dtype": "U8", "shape": [2], "data_offsets": [6, 8]},
    },
    "an overlap": {
        "a": {"dtype": "U8", "shape": [6], "data_offsets": [0, 6]},
        "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
    },
    "bytes that nobody owns": {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}},
    "a float offset": {"a": ENTRY | {"data_offsets": [0, 8.0]}},
    "a boolean offset": {"a": ENTRY | {"data_offsets": [False, 8]}},
    "a negative offset": {"a": ENTRY | {"data_offsets": [-8, 0]}},
    "three offsets": {"a": ENTRY | {"data_offsets": [0, 8, 8]}},
    "offsets beyond the file": {"a": {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]}},
    "a huge offset": {"a": ENTRY | {"data_offsets": [10**400, 10**400 + 8]}},
    "a huge dimension and none": {"a": {"dtype": "F32", "shape": [10**4000, 0], "data_offsets": [0, 0]}},
    "a long digit string": b'{"a":{"dtype":"F32","shape":[' + b"9" * 100_000 + b'],"data_offsets":[0,8]}}',
    "very many dimensions": {"a": {"dtype": "F32", "shape": [2**62] * 100_000, "data_offsets": [0, 8]}},
    "a two-dimensional shape": {"a": ENTRY | {"shape": [[2]]}},
    "an unknown type": {"a": ENTRY | {"dtype": "Q4_K"}},
    "a type that is no text": {"a": ENTRY | {"dtype": {}}},
    "metadata that are numbers": {"__metadata__": {"format": 1}, "a": ENTRY},
    "metadata that are a list": {"__metadata__": ["pt"], "a": ENTRY},
    "a text": '"text"',
    "a long name in trouble": {"n" * 100_000: ENTRY | {"shape": [3]}},
}


@pytest.mark.parametrize("name", HEADERS)
def test_header(source: Path, name: str) -> None:
    write_raw_safetensors(source / SINGLE, HEADERS[name], bytes(8))
    refused(source, SINGLE)


@pytest.mark.parametrize("length", [0, 1, 2**31, 2**63 - 1, 2**64 - 1, 100_000_000, 100_000_001])
def test_header_length(source: Path, length: int) -> None:
    write_raw_safetensors(source / SINGLE, b"{}", header_length=length)
    refused(source, SINGLE)


@pytest.mark.parametrize("content", [b"", b"\0", b"\x08\0\0\0\0\0\0\0", os.urandom(4096), bytes(4096)], ids=len)
def test_garbage(source: Path, content: bytes) -> None:
    (source / SINGLE).write_bytes(content)
    refused(source, SINGLE)


@pytest.mark.parametrize("change", [-1, -5000, 1, 4096])
def test_a_file_of_another_length_than_its_header_says(source: Path, change: int) -> None:
    os.truncate(source / SINGLE, (source / SINGLE).stat().st_size + change)
    refused(source, SINGLE)


def test_placeholders_of_zero3(source: Path) -> None:
    write_safetensors(source / SINGLE, {name: torch.empty(0) for name in read_tensors(source)})
    refused(source, "ZeRO-3")


# ---- Indices


@pytest.mark.parametrize(
    "shard",
    [
        "../source/model-00001-of-00002.safetensors", "/etc/passwd", "/tmp/x.safetensors", "sub/x.safetensors",
        "..\\x.safetensors", "x\0.safetensors", ".hidden.safetensors", "..", "", "model.bin", 5, None, True, 1.5,
        ["model.safetensors"], {"a": "b"}, "\x1b[2J/x.safetensors", "\ud800/x.safetensors",
    ],
)  # fmt: skip
def test_a_shard_that_is_no_plain_file_name(sharded: Path, shard: object) -> None:
    index = read_json(sharded / INDEX)
    index["weight_map"]["model.norm.weight"] = shard
    (sharded / INDEX).write_text(json.dumps(index))
    refused(sharded, INDEX, "plain")


@pytest.mark.parametrize("shards", [1, 100_000])
def test_a_hundred_thousand_entries(sharded: Path, shards: int) -> None:
    index = read_json(sharded / INDEX)
    index["weight_map"] |= {f"x.{number}": f"x-{number % shards}.safetensors" for number in range(100_000)}
    write_json(sharded / INDEX, index)
    refused(sharded, INDEX)


@pytest.mark.parametrize("size", ["many", "\x1b[2J" + "9" * 100_000, [1], {"a": None}, True, -1, 1.5, 10**400])
def test_any_total_size_is_survived(sharded: Path, size: object) -> None:
    write_json(sharded / INDEX, read_json(sharded / INDEX) | {"metadata": {"total_size": size}})
    result = invoke("inspect", sharded)
    assert result.exit_code == 0
    assert "total_size" in result.stdout
    assert all(line.isprintable() for line in result.stdout.split("\n"))
    assert len(result.stdout) < 10_000


# ---- config.json


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not JSON",
        "[]",
        "5",
        "null",
        "{",
        '"llama"',
        "[" * 100_000,
        '{"a":' * 900 + "1" + "}" * 900,
        "\xff\xfe",
        "{}",
    ],
    ids=range(11),
)
def test_a_config_that_is_none(source: Path, text: str) -> None:
    (source / CONFIG).write_bytes(text.encode("latin-1"))
    refused(source, CONFIG)


def test_a_deep_value_in_a_sound_config(source: Path) -> None:
    text = (source / CONFIG).read_text().rstrip().removesuffix("}")
    for depth in (100, 400, 900):
        (source / CONFIG).write_text(f'{text}, "x": {"[" * depth}{"]" * depth}}}')
        refused(source, CONFIG)


@pytest.mark.parametrize("name", [CONFIG, INDEX])
def test_a_huge_json_file(sharded: Path, name: str) -> None:
    os.truncate(sharded / name, 10**10)  # sparse
    refused(sharded, name)


@pytest.mark.parametrize("key", ["num_attention_heads", "num_key_value_heads", "num_hidden_layers", "head_dim"])
@pytest.mark.parametrize("value", [10**400, 10**9, -6, 0, "6", True, 6.0, [6], {"a": 6}, math.nan, 5, 2**17], ids=str)
def test_numbers(source: Path, key: str, value: object) -> None:
    edit_config(source, **{key: value})
    refused(source, CONFIG)


def test_no_heads(source: Path) -> None:
    edit_config(source, "num_attention_heads")
    refused(source, CONFIG, "num_attention_heads")


ODD: list[object] = [None, True, 5, -1.5, 10**400, "x", [], [[]], {}, {"a": []}, math.nan, "\ud800"]


@pytest.mark.parametrize("value", ODD, ids=range(len(ODD)))
def test_any_value_under_any_other_key_is_survived(source: Path, value: object) -> None:
    """Keys that are read but do not decide what can be converted: an error line or success, never a crash."""
    config = read_json(source / CONFIG)
    for key in (
        "text_config", "model_type", "quantization_config", "layer_types", "sliding_window", "rope_parameters",
        "rope_scaling", "partial_rotary_factor", "rotary_dim", "initializer_range", "tie_word_embeddings",
        "kv_lora_rank", "alibi", "architectures", "dtype", "torch_dtype",
    ):  # fmt: skip
        (source / CONFIG).write_text(json.dumps(config | {key: value}))
        for command in (
            ("inspect", source), ("inspect", source, "--json"),
            ("convert", source, source.parent / f"target-{key}", "--mqa", "--dtype", "bfloat16"),
        ):  # fmt: skip
            result = invoke(*command)
            assert result.exit_code in (0, 2), (key, result.output)
            assert result.exit_code == 0 or result.stderr.startswith("error: "), key


@pytest.mark.parametrize(
    "value",
    [
        {"quant_method": "gptq"}, {"quant_method": "fp8", "modules_to_not_convert": 5}, "awq", ["x"],
        {"modules_to_not_convert": "self_attn"}, {"load_in_4bit": True},
    ],
    ids=str,
)  # fmt: skip
def test_quantization_config(source: Path, value: object) -> None:
    edit_config(source, quantization_config=value)
    refused(source, "quantised")


@pytest.mark.parametrize(
    ("model_type", "word"),
    [
        ("lama", "llama"), ("qwen4", "qwen3"), ("zzz", "known: "), ("codegen", "no setting"), ("deepseek_v3", "MLA"),
        ("mamba", "no softmax"), (["llama"], "no model_type"),
    ],
)  # fmt: skip
def test_model_type(source: Path, model_type: object, word: str) -> None:
    edit_config(source, model_type=model_type)
    refused(source, word)


def test_unknown_family_option(source: Path) -> None:
    assert "llama" in fails(2, "convert", source, source.parent / "target", "--mqa", "--family", "lama")


@pytest.mark.parametrize("family", ["falcon", "phi", "phi3", "gpt_bigcode-mha", "stablelm", "olmo2"])
def test_family_with_another_layout(source: Path, family: str) -> None:
    tensors = read_tensors(source)
    for number in range(2):
        tensors[f"model.layers.{number}.self_attn.odd.weight"] = torch.zeros(2, 2)
    write_safetensors(source / SINGLE, tensors)
    before = listing(source.parent)
    one_line_each(fails(2, "convert", source, source.parent / "target", "--mqa", "--family", family))
    assert listing(source.parent) == before


def test_fused_shapes_that_do_not_fit(source: Path) -> None:
    edit_config(source, "head_dim", model_type="phi3")
    tensors = {name: t for name, t in read_tensors(source).items() if not any(f"{p}_proj" in name for p in "qkv")}
    for number in range(2):
        tensors[f"model.layers.{number}.self_attn.qkv_proj.weight"] = torch.zeros(3 * 48 + 1, 36)
    write_safetensors(source / SINGLE, tensors)
    refused(source, "do not fit")


@pytest.mark.parametrize("width", [1, 7, 9, 48])
def test_a_key_norm_of_another_width(source: Path, width: int) -> None:
    edit_config(source, model_type="qwen3")
    edit_tensors(
        source, {f"model.layers.{n}.self_attn.{p}_norm.weight": torch.ones(width) for n in (0, 1) for p in "qk"}
    )
    refused(source, "k_norm")


# ---- Foreign formats


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("model.layers.0.self_attn.q_proj.qweight", "quantised"), ("model.layers.0.mlp.up_proj.g_idx", "quantised"),
        ("model.layers.0.self_attn.q_proj.weight.absmax", "quantised"), ("a.weight_scale_inv", "quantised"),
        ("a.weight_packed", "quantised"), ("a.SCB", "quantised"), ("base_model.model.x.lora_A.weight", "PEFT"),
        ("_orig_mod.model.norm.weight", "torch.compile"), ("layers.0.attention.wq.weight", "Meta"),
        ("other.layers.0.self_attn.q_proj.weight", "several decoders"),
    ],
)  # fmt: skip
def test_names_that_tell_a_foreign_dump(source: Path, name: str, word: str) -> None:
    edit_tensors(source, {name: torch.zeros(48, 36)})
    refused(source, word)


def test_two_decoders(source: Path) -> None:
    tensors = read_tensors(source)
    edit_tensors(source, {name.replace("model.", "draft.", 1): tensor.clone() for name, tensor in tensors.items()})
    refused(source, "several decoders")


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"


@pytest.mark.parametrize("name", [SINGLE, CONFIG])
def test_lfs_pointers(source: Path, name: str) -> None:
    (source / name).write_bytes(POINTER)
    refused(source, name, "git lfs pull")


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("pytorch_model.bin", "pickle"), ("pytorch_model-00001-of-00002.bin", "pickle"), ("model.gguf", "GGUF"),
        ("adapter_model.bin", "pickle"), ("consolidated.00.pth", "Meta"), ("__0_0.distcp", "FSDP"),
        ("pytorch_model_fsdp_0/__0_0.distcp", "FSDP"), ("flax_model.msgpack", "framework"),
        ("global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt", "ZeRO"), ("notes.txt", "no safetensors"),
        ("sub/model.safetensors", "no safetensors"),
    ],
)  # fmt: skip
def test_folders_in_another_format(source: Path, name: str, word: str) -> None:
    (source / SINGLE).unlink()
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).write_bytes(b"PK")
    refused(source, word)


def test_an_adapter(source: Path) -> None:
    (source / SINGLE).rename(source / "adapter_model.safetensors")
    write_json(source / "adapter_config.json", {"peft_type": "LORA"})
    refused(source, "adapter", "merge_and_unload")


@pytest.mark.parametrize(
    ("name", "word"), [("model.gguf", "GGUF"), ("x.pth", "pickle"), (SINGLE, "is a file"), ("x", "is a file")]
)
def test_a_file_as_source(source: Path, name: str, word: str) -> None:
    (source.parent / "else").mkdir()
    (source.parent / "else" / name).write_bytes(b"GGUF")
    message = fails(2, "convert", source.parent / "else" / name, source.parent / "target", "--mqa")
    one_line_each(message)
    assert word in message


# ---- Files that are none


@pytest.mark.parametrize("name", [SINGLE, CONFIG])
@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "loop", "dangling"])
def test_special_files(source: Path, name: str, kind: str) -> None:
    path = source / name
    path.unlink()
    match kind:
        case "fifo":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "device":
            path.symlink_to("/dev/zero")
        case "loop":
            path.symlink_to(path)
        case _:
            path.symlink_to(source / "nowhere")
    refused(source)


def test_special_files_beside_the_weights_do_not_hang(source: Path) -> None:
    os.mkfifo(source / "tokenizer.json")
    (source / "loop").symlink_to(source)
    result = invoke("convert", source, source.parent / "target", "--mqa")
    assert result.exit_code == 0, result.stderr
    assert sorted(path.name for path in (source.parent / "target").iterdir()) == [
        "README.md", CONFIG, "gqaconvert.json", SINGLE,
    ]  # fmt: skip


# ---- What the user types


@pytest.mark.parametrize(
    "text", ["", ".", "..", "nowhere/at/all", "./x", "/", "~nobody/x", "x" * 5000, "a\nb", "a b", "\x1b[2J"]
)
def test_a_source_that_is_none(source: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    for command in (("inspect", text), ("convert", text, source.parent / "target", "--mqa")):
        one_line_each(fails(2, *command))


@pytest.mark.parametrize(
    "name", ["with space", "with\nnewline", "ünï", "[bold]x[/bold]", "-x", "\x1b[2J", os.fsdecode(b"\xff\xfe")]
)
def test_a_source_with_an_odd_name(tmp_path: Path, name: str) -> None:
    source = llama_checkpoint(tmp_path / name)
    for command in (
        ("inspect", source), ("inspect", source, "--json"), ("convert", source, tmp_path / "t", "--mqa"),
        ("inspect", tmp_path / "t"), ("convert", source, tmp_path / "u", "--mqa", "--dry-run"),
    ):  # fmt: skip
        result = invoke(*command)
        assert result.exit_code == 0, result.stderr
        assert all(line.isprintable() for line in (result.stdout + result.stderr).split("\n"))


def test_the_working_folder_as_source(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source)
    assert invoke("inspect", ".").exit_code == 0
    assert invoke("convert", ".", "../target", "--mqa").exit_code == 0


@pytest.mark.parametrize(
    ("target", "exit_code"),
    [
        ("", 2), ("/", 2), (".", 2), ("..", 2), ("new/..", 2), ("source", 2), ("source/../source", 2), ("file", 2),
        ("file/below", 3), ("/proc/x", 3), ("/dev/null", 2), ("/dev/null/x", 3), ("x" * 300, 3), ("loop/x", 2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("option", ["--quiet", "--overwrite", "--resume"])
def test_a_destination_that_cannot_be(
    source: Path, target: str, exit_code: int, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = source.parent
    monkeypatch.chdir(root)
    write_json(root / CONFIG, {})  # even if the working folder looks like a model
    write_json(root.parent / CONFIG, {})
    (root / "file").write_text("mine")
    (root / "loop").symlink_to("loop")
    before = listing(root)
    result = invoke("convert", source, target, "--mqa", option)
    assert result.exit_code == exit_code or (result.exit_code in (2, 3) and target in ("file/below", "loop/x"))
    one_line_each(result.stderr)
    assert listing(root) == before


@pytest.mark.parametrize("option", ["--quiet", "--dry-run"])
def test_an_empty_destination_is_not_the_working_folder(
    tmp_path: Path, source: Path, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unset variable of a script."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    assert "the destination is empty" in fails(2, "convert", source, "", "--mqa", option)
    assert empty.is_dir()
    assert not list(empty.iterdir())


# ---- The terminal

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\r\n\u202e[red]"
Arrange = Callable[[Path], object]
EVIL_PLACES: dict[str, Arrange] = {
    "a tensor's name": lambda s: edit_tensors(s, {f"x.{EVIL}": torch.zeros(1)}),
    "an attention tensor's name": lambda s: edit_tensors(
        s, {f"model.layers.0.self_attn.{EVIL}.weight": torch.zeros(1)}
    ),
    "a decoder's name": lambda s: edit_tensors(s, {f"{EVIL}.layers.0.self_attn.q_proj.weight": torch.zeros(1)}),
    "a file's name": lambda s: (s / f"{EVIL.replace('/', '')}.bin").write_bytes(b"x"),
    "a shard's name": lambda s: (s / SINGLE).rename(s / f"{EVIL}.safetensors"),
    "a file's undecodable name": lambda s: (s / os.fsdecode(b"\xff\x1b[2J.bin")).write_bytes(b"x"),
    "a stray shard's undecodable name": lambda s: (s / os.fsdecode(b"\xff\x1b.safetensors")).write_bytes(b"x"),
    "model_type": lambda s: edit_config(s, model_type=EVIL),
    "a number": lambda s: edit_config(s, num_attention_heads=EVIL),
    "quantization_config": lambda s: edit_config(s, quantization_config={"quant_method": EVIL}),
    "provenance": lambda s: write_json(s / "gqaconvert.json", {"tool": {"name": EVIL}, "source": {"id": EVIL}}),
    "a header": lambda s: write_raw_safetensors(s / SINGLE, {EVIL: ENTRY | {"dtype": EVIL}}, bytes(8)),
    "metadata": lambda s: write_safetensors(s / SINGLE, read_tensors(s), {"format": "pt", EVIL: EVIL}),
}


@pytest.mark.parametrize("place", EVIL_PLACES)
def test_escape_sequences_do_not_reach_the_terminal(source: Path, place: str) -> None:
    EVIL_PLACES[place](source)
    target = source.parent / "target"
    for command in (
        ("inspect", source), ("inspect", source, "--json"), ("inspect", source, "--check"),
        ("convert", source, target, "--mqa", "--dry-run"), ("convert", source, target, "--mqa", "--dry-run", "--json"),
        ("convert", source, target, "--mqa"), ("inspect", target),
    ):  # fmt: skip
        result = invoke(*command)
        assert result.exit_code in (0, 1, 2), result.output
        assert all(line.isprintable() for line in (result.stdout + result.stderr).split("\n")), repr(result.output)


def test_a_process_of_its_own_ends_the_same_way(source: Path) -> None:
    edit_tensors(source, {f"model.layers.0.self_attn.{EVIL}.weight": torch.zeros(1)})
    (source / os.fsdecode(b"\xff.bin")).write_bytes(b"x")
    run = process("convert", source, source.parent / "target", "--mqa")
    assert run.returncode == 2
    one_line_each(run.stderr)
    assert run.stdout == ""
