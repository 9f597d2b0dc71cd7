"""`gqaconvert convert`: what changes and what does not, and that a destination is whole or not there."""

import itertools
import json
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.bench.kill import forked, study
from tests.support.checkpoints import (
    big_llama_checkpoint,
    llama_checkpoint,
    write_raw_safetensors,
    write_safetensors,
)
from tests.support.runs import (
    COMMAND,
    INDEX,
    SINGLE,
    RawTensor,
    convert,
    edit_config,
    fails,
    half_done,
    invoke,
    listing,
    process,
    raw_tensors,
    read_json,
    read_raw,
    start,
    tree,
    wait_until,
    write_json,
)

ATTENTION = re.compile(r"model\.layers\.\d+\.self_attn\.[kv]_proj\.(weight|bias)")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """6 heads, each with K and V of its own, in one file."""
    return llama_checkpoint(tmp_path / "source", bias=True)


# ---- Tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shards", [1, 4])
def test_only_k_and_v_change(tmp_path: Path, shards: int, dtype: torch.dtype) -> None:
    source = llama_checkpoint(tmp_path / "source", bias=True, shards=shards, dtype=dtype)
    before, after = raw_tensors(source), raw_tensors(convert(source, tmp_path / "target", "--kv-heads", 2))
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if ATTENTION.fullmatch(name)}
    for name in changed:
        assert after[name].dtype == before[name].dtype
        assert after[name].shape == (before[name].shape[0] // 3, *before[name].shape[1:])


def test_metadata_is_kept_and_says_pt(tmp_path: Path, source: Path) -> None:
    tensors, _ = read_raw(source / SINGLE)
    torch_tensors = {name: torch.zeros(raw.shape) for name, raw in tensors.items()}
    write_safetensors(source / SINGLE, torch_tensors, {"format": "pt", "license": "é", "step": "7"})
    _, metadata = read_raw(convert(source, tmp_path / "target", "--mqa") / SINGLE)
    assert metadata == {"format": "pt", "license": "é", "step": "7"}


def test_missing_metadata_is_added(tmp_path: Path, source: Path) -> None:
    """transformers refuses a file without it."""
    tensors, _ = read_raw(source / SINGLE)
    write_safetensors(source / SINGLE, {name: torch.zeros(raw.shape) for name, raw in tensors.items()}, {})
    _, metadata = read_raw(convert(source, tmp_path / "target", "--mqa") / SINGLE)
    assert metadata == {"format": "pt"}


def check_index(folder: Path) -> list[str]:
    """The index is exactly what the files hold; returns the names of the shards."""
    index = read_json(folder / INDEX)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    where = {name: file for file in files for name in read_raw(folder / file)[0]}
    assert index["weight_map"] == where
    assert index["metadata"]["total_size"] == sum(len(raw.data) for raw in raw_tensors(folder).values())
    for file in files:
        assert read_raw(folder / file)[1] == {"format": "pt"}
    return files


def test_sharding_is_kept(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", shards=5)
    target = convert(source, tmp_path / "target", "--kv-heads", 3)
    names = [f"model-{number:05d}-of-00005.safetensors" for number in range(1, 6)]
    assert check_index(target) == names
    assert read_json(target / INDEX)["weight_map"] == read_json(source / INDEX)["weight_map"]


def test_shards_keep_unusual_names(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", shards=2)
    index = read_json(source / INDEX)
    renamed = {
        "model-00001-of-00002.safetensors": "déjà vu.safetensors",
        "model-00002-of-00002.safetensors": "b.safetensors",
    }
    for old, new in renamed.items():
        (source / old).rename(source / new)
    index["weight_map"] = {name: renamed[file] for name, file in index["weight_map"].items()}
    write_json(source / INDEX, index)
    assert check_index(convert(source, tmp_path / "target", "--mqa")) == sorted(renamed.values())


def test_every_tensor_in_a_file_of_its_own(tmp_path: Path) -> None:
    count = len(raw_tensors(llama_checkpoint(tmp_path / "one", layers=1)))
    source = llama_checkpoint(tmp_path / "source", layers=1, shards=count)
    assert len(check_index(convert(source, tmp_path / "target", "--mqa"))) == count


def test_a_single_file_under_another_name_gets_the_stock_name(tmp_path: Path, source: Path) -> None:
    wanted = raw_tensors(convert(source, tmp_path / "wanted", "--mqa"))
    (source / SINGLE).rename(source / "weights.safetensors")
    target = convert(source, tmp_path / "target", "--mqa")
    assert [path.name for path in target.glob("*.safetensors")] == [SINGLE]
    assert raw_tensors(target) == wanted
    assert not (target / INDEX).exists()


def test_shards_without_an_index_get_one(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", shards=3)
    wanted = tree(convert(source, tmp_path / "wanted", "--mqa"))
    (source / INDEX).unlink()
    target = convert(source, tmp_path / "target", "--mqa")
    check_index(target)
    assert tree(target)[INDEX] == wanted[INDEX]


@pytest.mark.parametrize(("size", "limit"), [("20KB", 20_000), ("20KiB", 20_480), ("4000", 4000), ("0.03MB", 30_000)])
def test_max_shard_size(tmp_path: Path, size: str, limit: int) -> None:
    source = llama_checkpoint(tmp_path / "source", shards=2)
    whole = raw_tensors(convert(source, tmp_path / "whole", "--kv-heads", 2))
    target = convert(source, tmp_path / "target", "--kv-heads", 2, "--max-shard-size", size)
    files = check_index(target)
    assert files == [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert raw_tensors(target) == whole
    sizes = []
    for file in files:
        tensors, _ = read_raw(target / file)
        sizes.append(sum(len(raw.data) for raw in tensors.values()))
        assert sizes[-1] <= limit or len(tensors) == 1
    assert all(one + other > limit for one, other in itertools.pairwise(sizes)), "neighbours fit in one file"


def test_max_shard_size_can_merge_shards(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", shards=4)
    target = convert(source, tmp_path / "target", "--mqa", "--max-shard-size", "5GB")
    assert [path.name for path in target.glob("*.safetensors*")] == [SINGLE]
    assert raw_tensors(target) == raw_tensors(convert(source, tmp_path / "sharded", "--mqa"))


@pytest.mark.parametrize("size", ["0", "-5GB", "5XB", "GB", ""])
def test_a_max_shard_size_that_is_none_is_refused(tmp_path: Path, source: Path, size: str) -> None:
    result = invoke("convert", source, tmp_path / "target", "--mqa", f"--max-shard-size={size}")
    assert result.exit_code == 2
    assert "not a size" in result.stderr
    assert not (tmp_path / "target").exists()


def test_stock_transformers_loads_a_resharded_recast_output(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", shards=2, tied=True)
    target = convert(source, tmp_path / "target", "--kv-heads", 2, "--max-shard-size", "30KB", "--dtype", "bfloat16")
    loaded: Any = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    model, report = loaded
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.num_key_value_heads == 2
    assert model.dtype is torch.bfloat16


ODD = {
    "model.position_ids": ("I64", [3], bytes(range(24))),
    "model.mask": ("BOOL", [5], b"\0\1\1\0\1"),
    "model.codes": ("U8", [2, 3], b"\xff\0\1\2\3\4"),
    "model.scale": ("F8_E4M3", [3], b"\x7f\x38\xff"),
    "model.scale2": ("F8_E5M2", [1], b"\x7c"),
    "model.exponent": ("F8_E8M0", [2], b"\0\xff"),
    "model.packed": ("F4", [4], b"\x12\x34"),
    "model.scalar": ("I32", [], b"\1\0\0\0"),
    "model.empty": ("I16", [0, 4], b""),
    "model.short": ("U16", [1], b"\7\0"),
    "../../outside": ("U8", [1], b"\1"),
    "/etc/absolute": ("U8", [1], b"\2"),
    "model/with/../slashes": ("U8", [1], b"\3"),
    '模型.權重 \N{GRINNING FACE} \\ " \n': ("U8", [1], b"\4"),
    "x" * 5000: ("U8", [1], b"\5"),
}


def add_raw(path: Path, extra: dict[str, tuple[str, list[int], bytes]]) -> None:
    """Append tensors of any type to a file, byte by byte."""
    tensors, metadata = read_raw(path)
    header: dict[str, Any] = {"__metadata__": metadata}
    body = b""
    for name, (dtype, shape, data) in {**tensors, **extra}.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    write_raw_safetensors(path, header, body)


@pytest.mark.parametrize("options", [(), ("--max-shard-size", "10KB"), ("--dtype", "float16")])
def test_tensors_of_any_type_and_name_are_carried(tmp_path: Path, source: Path, options: tuple[str, ...]) -> None:
    add_raw(source / SINGLE, ODD)
    target = convert(source, tmp_path / "target", "--kv-heads", 2, *options)
    after = raw_tensors(target)
    assert {name: after[name] for name in ODD} == {
        name: RawTensor(dtype, tuple(shape), data) for name, (dtype, shape, data) in ODD.items()
    }
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_modes_follow_the_umask(tmp_path: Path, source: Path, mask: int) -> None:
    (source / "assets").mkdir()
    (source / "assets" / "voice.json").write_text("{}")
    before = os.umask(mask)
    try:
        target = convert(source, tmp_path / "target", "--mqa")
    finally:
        os.umask(before)
    for path in (target, *target.rglob("*")):
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert path.stat().st_mode & 0o777 == wanted, path


# ---- config.json


def converted_config(source: Path, *options: object) -> dict[str, Any]:
    document = read_json(convert(source, source.parent / "target", *(options or ("--kv-heads", 2))) / "config.json")
    assert isinstance(document, dict)
    return document


def test_config_keeps_order_and_everything_else(source: Path) -> None:
    config = edit_config(source, rope_scaling={"z": 1, "a": {"deep": [1, 2.5e-7, None]}}, note="é", big=2**60)
    after = converted_config(source)
    assert list(after) == list(config)
    assert after == config | {"num_key_value_heads": 2}


@pytest.mark.parametrize("present", ["absent", "null"])
def test_a_config_without_a_count_gets_one(source: Path, present: str) -> None:
    """Old configs of MHA models have no such key, or null."""
    config = edit_config(source, "num_key_value_heads", **({"num_key_value_heads": None} if present == "null" else {}))
    after = converted_config(source)
    assert after == config | {"num_key_value_heads": 2}
    assert json.dumps(after).count("num_key_value_heads") == 1


def test_config_without_head_dim_gets_none(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", head_dim=None)
    assert "head_dim" not in converted_config(source)


def test_a_nested_config_is_changed_where_it_is_read(source: Path) -> None:
    config = read_json(source / "config.json")
    nested = {"architectures": ["Some"], "text_config": config, "vision_config": {"num_attention_heads": 99}}
    write_json(source / "config.json", nested)
    assert converted_config(source) == nested | {"text_config": config | {"num_key_value_heads": 2}}


def test_a_flat_copy_of_a_nested_count_follows(source: Path) -> None:
    config = read_json(source / "config.json")
    nested = {"num_key_value_heads": 6, "model_type": "wrapper", "text_config": config}
    write_json(source / "config.json", nested)
    wanted = {"num_key_value_heads": 2, "model_type": "wrapper", "text_config": config | {"num_key_value_heads": 2}}
    assert converted_config(source) == wanted


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_dtype_is_renamed_under_the_key_that_is_there(source: Path, key: str) -> None:
    config = edit_config(source, "torch_dtype", **{key: "float32"})
    wanted = config | {key: "bfloat16", "num_key_value_heads": 2}
    assert converted_config(source, "--kv-heads", 2, "--dtype", "bfloat16") == wanted
    assert {raw.dtype for raw in raw_tensors(source.parent / "target").values()} == {"BF16"}


def test_dtype_adds_no_key(source: Path) -> None:
    config = edit_config(source, "torch_dtype")
    wanted = config | {"num_key_value_heads": 2}
    assert converted_config(source, "--kv-heads", 2, "--dtype", "float16") == wanted


def test_a_nested_dtype_follows_too(source: Path) -> None:
    config = read_json(source / "config.json")
    write_json(source / "config.json", {"dtype": "float32", "text_config": config})
    after = converted_config(source, "--kv-heads", 2, "--dtype", "bfloat16")
    assert after["dtype"] == "bfloat16"
    assert after["text_config"]["torch_dtype"] == "bfloat16"


def test_widening_a_type_is_exact(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", dtype=torch.bfloat16)
    target = convert(source, tmp_path / "target", "--kv-heads", 2, "--dtype", "float32")
    before, after = raw_tensors(source), raw_tensors(target)
    for name, raw in before.items():
        if not ATTENTION.fullmatch(name):  # a bfloat16 is the upper half of a float32
            upper = b"".join(after[name].data[start + 2 : start + 4] for start in range(0, len(after[name].data), 4))
            assert upper == raw.data
            assert after[name].dtype == "F32"


@pytest.mark.parametrize("name", ["float8", "BF16", "int8", ""])
def test_an_unknown_dtype_is_refused_with_the_known_ones(tmp_path: Path, source: Path, name: str) -> None:
    message = fails(2, "convert", source, tmp_path / "target", "--mqa", "--dtype", name)
    assert "bfloat16" in message


# ---- gqaconvert.json


def test_provenance(tmp_path: Path, source: Path) -> None:
    target = convert(source, tmp_path / "target", "--kv-heads", 2, "--method", "random", "--seed", 5)
    record = read_json(target / "gqaconvert.json")
    assert record["source"]["id"] == str(source)
    assert record["source"]["num_key_value_heads"] == 6
    assert record["source"]["provenance"] is None
    assert record["recipe"]["num_key_value_heads"] == 2
    assert record["recipe"]["method"] == "random"
    assert record["recipe"]["seed"] == 5
    weights = (target / SINGLE).read_bytes()
    digest = subprocess.run(["sha256sum", target / SINGLE], capture_output=True, text=True, check=True).stdout.split()
    assert record["shards"] == {SINGLE: {"sha256": digest[0], "nbytes": len(weights)}}
    # 2 layers, K and V, 2 heads of 8 numbers of 4 bytes
    assert record["result"]["cache_bytes_per_token"] == 2 * 2 * 2 * 8 * 4
    assert record["result"]["total_size"] == sum(len(raw.data) for raw in raw_tensors(target).values())


def test_provenance_is_a_chain(tmp_path: Path, source: Path) -> None:
    one = convert(source, tmp_path / "one", "--kv-heads", 3)
    two = convert(one, tmp_path / "two", "--mqa")
    record = read_json(two / "gqaconvert.json")
    assert record["source"]["provenance"] == read_json(one / "gqaconvert.json")
    assert record["source"]["provenance"]["source"]["num_key_value_heads"] == 6
    assert not (two / "gqaconvert.source.json").exists()


def test_a_foreign_provenance_file_does_no_harm(tmp_path: Path, source: Path) -> None:
    (source / "gqaconvert.json").write_text("[no JSON")
    record = read_json(convert(source, tmp_path / "target", "--mqa") / "gqaconvert.json")
    assert record["source"]["provenance"] is None


@pytest.mark.parametrize("options", [(), ("--method", "random"), ("--max-shard-size", "20KB", "--dtype", "bfloat16")])
def test_two_runs_give_the_same_bytes(tmp_path: Path, options: tuple[str, ...]) -> None:
    source = llama_checkpoint(tmp_path / "source", shards=3, extra_sidecars={"tokenizer.json": "{}"})
    one = convert(source, tmp_path / "one", "--mqa", *options)
    two = forked("convert", source, tmp_path / "two", "--mqa", *options)  # hashes of str differ between processes
    two.join()
    assert two.exitcode == 0
    assert tree(one) == tree(tmp_path / "two")


def test_the_source_is_only_read(tmp_path: Path, source: Path) -> None:
    before = listing(source), tree(source)
    convert(source, tmp_path / "target", "--mqa")
    assert (listing(source), tree(source)) == before


# ---- Destination


def test_an_empty_destination_is_used(tmp_path: Path, source: Path) -> None:
    (tmp_path / "target").mkdir()
    convert(source, tmp_path / "target", "--mqa")
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}


def test_folders_above_the_destination_are_made(tmp_path: Path, source: Path) -> None:
    target = convert(source, tmp_path / "a" / "b" / "target", "--mqa")
    assert [path.name for path in target.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("existing", ["notes.txt", ".hidden", "config.json"])
def test_a_destination_that_is_not_empty_is_refused(tmp_path: Path, source: Path, existing: str) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / existing).write_text("mine")
    message = fails(2, "convert", source, target, "--mqa")
    assert "--overwrite" in message
    assert str(target) in message
    assert tree(target) == {existing: b"mine"}
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}


def test_overwrite_replaces_the_whole_folder(tmp_path: Path, source: Path) -> None:
    wanted = tree(convert(source, tmp_path / "wanted", "--mqa"))
    target = convert(source, tmp_path / "target", "--kv-heads", 2, "--max-shard-size", "10KB")
    (target / "notes.txt").write_text("old")
    convert(source, target, "--mqa", "--overwrite")
    assert tree(target) == wanted
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target", "wanted"}


def test_overwrite_needs_a_model_to_replace(tmp_path: Path, source: Path) -> None:
    target = tmp_path / "target"
    (target / "letters").mkdir(parents=True)
    (target / "letters" / "dear.txt").write_text("mine")
    fails(2, "convert", source, target, "--mqa", "--overwrite")
    assert tree(target) == {"letters/dear.txt": b"mine"}


def test_the_working_folder_is_never_replaced(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = convert(source, tmp_path / "target", "--mqa")
    before = tree(target)
    (target / "inner").mkdir()
    for place in (target, target / "inner"):
        monkeypatch.chdir(place)
        fails(2, "convert", source, target, "--kv-heads", 2, "--overwrite")
    assert tree(target) == before


def test_a_file_as_destination_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "target").write_text("mine")
    fails(2, "convert", source, tmp_path / "target", "--mqa", "--overwrite")
    assert (tmp_path / "target").read_text() == "mine"


def test_a_destination_below_a_file_is_refused(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = invoke("convert", source, tmp_path / "file" / "target", "--mqa")
    assert result.exit_code in (2, 3)
    assert result.stderr.startswith("error: ")


Arrange = Callable[[Path, Path], tuple[Path, Path]]


def linked(target: Path, link: Path) -> Path:
    link.symlink_to(target)
    return link


def overlap_by_shard(root: Path, source: Path) -> tuple[Path, Path]:
    """The only shard is a link into the destination."""
    other = llama_checkpoint(root / "other")
    (source / SINGLE).unlink()
    (source / SINGLE).symlink_to(other / SINGLE)
    return source, other


OVERLAPS: dict[str, Arrange] = {
    "same": lambda root, source: (source, source),
    "same, other spelling": lambda root, source: (source, source / "." / ".." / "source"),
    "same, by a link to the source": lambda root, source: (linked(source, root / "link"), source),
    "same, by a link to the destination": lambda root, source: (source, linked(source, root / "link")),
    "same, by a link above": lambda root, source: (source, linked(root, root / "up") / "source"),
    "destination in the source": lambda root, source: (source, source / "target"),
    "destination deep in the source": lambda root, source: (source, source / "a" / "b"),
    "destination in the source, by a link": lambda root, source: (source, linked(source, root / "link") / "target"),
    "source in the destination": lambda root, source: (source, root),
    "shard in the destination": overlap_by_shard,
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_source_and_destination_may_not_overlap(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    source = llama_checkpoint(root / "source")
    write_json(root / "config.json", {})  # else the destination is refused for being no model
    source, target = OVERLAPS[name](root, source)
    before = listing(root), tree(root)
    for options in ((), ("--overwrite",), ("--restart",), ("--resume", "--overwrite")):
        fails(2, "convert", source, target, "--mqa", *options)
        assert (listing(root), tree(root)) == before, options


def test_a_shard_linked_hard_into_the_destination_survives(tmp_path: Path, source: Path) -> None:
    """Replacing a folder replaces names; the data behind a second name of the source must stay."""
    wanted = tree(convert(source, tmp_path / "wanted", "--mqa"))
    target = tmp_path / "target"
    target.mkdir()
    write_json(target / "config.json", {})
    os.link(source / SINGLE, target / SINGLE)
    before = (source / SINGLE).read_bytes()
    result = invoke("convert", source, target, "--mqa", "--overwrite")
    assert (source / SINGLE).read_bytes() == before
    assert result.exit_code == 2 or tree(target) == wanted


def test_a_neighbour_with_a_longer_name_is_no_overlap(tmp_path: Path, source: Path) -> None:
    convert(source, tmp_path / "source-gqa", "--mqa")


def test_a_destination_spelled_with_dots(tmp_path: Path, source: Path) -> None:
    (tmp_path / "x").mkdir()
    convert(source, tmp_path / "x" / ".." / "target", "--mqa")
    assert (tmp_path / "target" / "config.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target", "x"}


# ---- Interruptions


def limit_file_size(size: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@pytest.mark.parametrize("mode", ["new", "overwrite"])
def test_a_failure_midway_keeps_the_old_and_is_resumed(tmp_path: Path, mode: str) -> None:
    source = llama_checkpoint(tmp_path / "source", shards=6)
    wanted = tree(convert(source, tmp_path / "wanted", "--kv-heads", 2))
    sizes = [path.stat().st_size for path in sorted((tmp_path / "wanted").glob("*.safetensors"))]
    # Two shards or more fit, then one does not.
    limit = next(size - 1 for number, size in enumerate(sizes) if number > 1 and size > max(sizes[:number]))
    target = tmp_path / "target"
    options: tuple[str, ...] = ()
    if mode == "overwrite":
        convert(source, target, "--mqa")
        options = ("--overwrite",)
    before = tree(target)
    command = ("convert", source, target, "--kv-heads", 2, *options)
    failed = process(*command, preexec_fn=limit_file_size(limit))
    assert failed.returncode == 3, failed.stderr
    assert failed.stderr.startswith("error: ")
    assert "--resume" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert tree(target) == before
    assert target.exists() == (mode == "overwrite")
    refused = fails(2, *command)
    assert "--resume" in refused
    assert "--restart" in refused
    resumed = invoke(*command, "--resume", "--json")
    assert resumed.exit_code == 0, resumed.stderr
    assert json.loads(resumed.stdout)["resumed_shards"], "what was finished is not written again"
    assert tree(target) == wanted
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target", "wanted"}


def interrupted(source: Path, target: Path, *options: object) -> None:
    """Leave what a killed run leaves."""
    with half_done(source, target, *options) as running:
        running.kill()


def test_restart_discards_an_interrupted_run(tmp_path: Path, source: Path) -> None:
    wanted = tree(convert(source, tmp_path / "wanted", "--mqa"))
    interrupted(source, tmp_path / "target", "--kv-heads", 2)
    convert(source, tmp_path / "target", "--mqa", "--restart")
    assert tree(tmp_path / "target") == wanted
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target", "wanted"}


def test_another_run_is_not_resumed(tmp_path: Path, source: Path) -> None:
    interrupted(source, tmp_path / "target", "--kv-heads", 2)
    for options in (("--mqa",), ("--kv-heads", 2, "--method", "first"), ("--kv-heads", 2, "--dtype", "float16")):
        assert "--restart" in fails(2, "convert", source, tmp_path / "target", *options, "--resume")
    edit_config(source, rope_theta=5.0)
    assert "--restart" in fails(2, "convert", source, tmp_path / "target", "--kv-heads", 2, "--resume")


def test_a_run_killed_before_its_first_record_is_resumed(tmp_path: Path, source: Path) -> None:
    wanted = tree(convert(source, tmp_path / "wanted", "--mqa"))
    interrupted(source, tmp_path / "target", "--mqa")
    (record,) = tmp_path.glob(".*/state.json")
    record.unlink()  # the kill fell between making the folder and writing this
    convert(source, tmp_path / "target", "--mqa", "--resume")
    assert tree(tmp_path / "target") == wanted


@pytest.mark.parametrize("complete", [True, False])
def test_a_run_killed_while_the_replaced_model_is_deleted_is_resumed(
    tmp_path: Path, source: Path, complete: bool
) -> None:
    wanted = tree(convert(source, tmp_path / "wanted", "--mqa"))
    target, staging = tmp_path / "target", tmp_path / ".target.gqaconvert"
    interrupted(source, target, "--mqa")
    # What a kill leaves between the renames (complete) and while the old model is deleted.
    convert(source, tmp_path / "older", "--kv-heads", 2)
    (tmp_path / "older").rename(staging / "old")
    if not complete:
        (staging / "old" / "model.safetensors").unlink()
        shutil.copytree(tmp_path / "wanted", target)
    convert(source, target, "--mqa", "--resume", "--overwrite")
    assert tree(target) == wanted
    assert not staging.exists()


def test_a_damaged_finished_shard_is_written_again(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", shards=6)
    wanted = tree(convert(source, tmp_path / "wanted", "--kv-heads", 2))
    sizes = [path.stat().st_size for path in sorted((tmp_path / "wanted").glob("*.safetensors"))]
    limit = next(size - 1 for number, size in enumerate(sizes) if number > 1 and size > max(sizes[:number]))
    target = tmp_path / "target"
    failed = process("convert", source, target, "--kv-heads", 2, preexec_fn=limit_file_size(limit))
    assert failed.returncode == 3
    first = min(tmp_path.glob(".*/model/*.safetensors"))
    content = bytearray(first.read_bytes())
    content[-1] ^= 1
    first.write_bytes(content)
    convert(source, target, "--kv-heads", 2, "--resume")
    assert tree(target) == wanted


def test_resume_without_an_interrupted_run_just_runs(tmp_path: Path, source: Path) -> None:
    wanted = tree(convert(source, tmp_path / "wanted", "--mqa"))
    assert tree(convert(source, tmp_path / "target", "--mqa", "--resume")) == wanted
    # ... and once it is done, there is nothing to do.
    before = listing(tmp_path / "target")
    convert(source, tmp_path / "target", "--mqa", "--resume")
    assert listing(tmp_path / "target") == before
    fails(2, "convert", source, tmp_path / "target", "--kv-heads", 2, "--resume")
    assert listing(tmp_path / "target") == before


def test_resume_and_restart_contradict_each_other(tmp_path: Path, source: Path) -> None:
    fails(2, "convert", source, tmp_path / "target", "--mqa", "--resume", "--restart")


def test_a_second_run_to_the_same_destination_is_refused(tmp_path: Path) -> None:
    source = big_llama_checkpoint(tmp_path / "source", 0.05, shards=3)
    target = tmp_path / "target"
    with half_done(source, target, "--kv-heads", 2) as running:
        for options in ((), ("--resume",), ("--restart",), ("--overwrite",)):
            assert "another run" in fails(2, "convert", source, target, "--kv-heads", 2, *options)
        running.send_signal(signal.SIGCONT)
        assert running.wait(60) == 0
    assert tree(target) == tree(convert(source, tmp_path / "wanted", "--kv-heads", 2))
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target", "wanted"}


def test_ctrl_c_leaves_something_to_resume(tmp_path: Path) -> None:
    source = big_llama_checkpoint(tmp_path / "source", 0.4, shards=8)
    target = tmp_path / "target"
    running = start("convert", source, target, "--kv-heads", 2)
    wait_until(lambda: any(tmp_path.glob(".*/model/*.safetensors")), running)
    running.send_signal(signal.SIGINT)
    output, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert output == ""
    assert errors.startswith("error: interrupted\n")
    assert "--resume" in errors
    assert "Traceback" not in errors
    assert not target.exists()
    convert(source, target, "--kv-heads", 2, "--resume")
    assert tree(target) == tree(convert(source, tmp_path / "wanted", "--kv-heads", 2))
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target", "wanted"}


def test_kills_leave_all_or_nothing(tmp_path: Path) -> None:
    """The short version of ``python -m tests.bench.kill``."""
    source = big_llama_checkpoint(tmp_path / "source", 0.02, shards=3)
    outcomes = list(study(source, tmp_path, runs=16, seed=0))
    assert len(outcomes) == 16
    for outcome in outcomes:
        assert not outcome.left.startswith("BROKEN"), outcome
        assert outcome.resumed == "identical", outcome
    assert any(outcome.left == "staging" for outcome in outcomes), "no run was hit while it wrote"


def test_a_source_that_does_not_fit_is_refused_at_once(tmp_path: Path, source: Path) -> None:
    tensors, _ = read_raw(source / SINGLE)
    huge = 6 * 2**40
    header: dict[str, Any] = {}
    end = 0
    for name, raw in tensors.items():
        header[name] = {"dtype": raw.dtype, "shape": raw.shape, "data_offsets": [end, end + len(raw.data)]}
        end += len(raw.data)
    header["model.huge"] = {"dtype": "U8", "shape": [huge], "data_offsets": [end, end + huge]}
    encoded = json.dumps(header).encode()
    with (source / SINGLE).open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end + huge)
    assert shutil.disk_usage(tmp_path).free < huge
    message = fails(3, "convert", source, tmp_path / "target", "--mqa")
    assert "GiB" in message
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_source_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    source = big_llama_checkpoint(tmp_path / "source", 0.05, shards=3)
    with half_done(source, tmp_path / "target", "--kv-heads", 2) as running:
        last = max(source.glob("*.safetensors"))
        with last.open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"\0\0")
        running.send_signal(signal.SIGCONT)
        _, errors = running.communicate(timeout=60)
    assert running.returncode == 2
    assert "changed" in errors
    assert not (tmp_path / "target").exists()


def test_a_place_that_cannot_be_written(source: Path) -> None:
    fails(3, "convert", source, "/proc/target", "--mqa")  # not even root can


# ---- Output


def test_json_is_all_there_is_on_stdout(tmp_path: Path, source: Path) -> None:
    (source / "model.onnx").write_bytes(b"x")
    dry = invoke("convert", source, tmp_path / "target", "--kv-heads", 2, "--dry-run", "--json")
    done = invoke("convert", source, tmp_path / "target", "--kv-heads", 2, "--json")
    assert (dry.exit_code, dry.stderr) == (0, "")
    assert (done.exit_code, done.stderr) == (0, "")
    plan, result = json.loads(dry.stdout), json.loads(done.stdout)
    assert plan["dry_run"] is True
    assert result["dry_run"] is False
    volatile = ("dry_run", "shards", "free_bytes", "resumed_shards", "sites", "commit_url")
    assert {key: plan[key] for key in plan if key not in volatile} == {
        key: result[key] for key in result if key not in volatile
    }
    record = read_json(tmp_path / "target" / "gqaconvert.json")
    assert {shard["name"]: shard["sha256"] for shard in result["shards"]} == {
        name: shard["sha256"] for name, shard in record["shards"].items()
    }
    assert {tensor["name"] for tensor in plan["changed_tensors"]} == {
        name for name in raw_tensors(source) if ATTENTION.fullmatch(name)
    }
    assert plan["output_bytes"] == sum(
        len(content) for name, content in tree(tmp_path / "target").items() if name.endswith(".safetensors")
    )
    assert "model.onnx" in plan["left_out"]


def test_quiet_is_silent(tmp_path: Path, source: Path) -> None:
    (source / "model.onnx").write_bytes(b"x")
    done = process("convert", source, tmp_path / "target", "--mqa", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    wrong = invoke("convert", source, tmp_path / "other", "--kv-heads", 5, "--quiet")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: ")


@pytest.mark.parametrize("options", [(), ("--json",), ("--quiet",), ("--overwrite",), ("--restart",)])
def test_a_dry_run_writes_nothing(tmp_path: Path, source: Path, options: tuple[str, ...]) -> None:
    convert(source, tmp_path / "old", "--mqa")
    for target in (tmp_path / "target", tmp_path / "old"):
        before = listing(tmp_path)
        result = invoke("convert", source, target, "--kv-heads", 2, "--dry-run", *options)
        # A destination that the real run would refuse is worth a failure, but never a change.
        assert result.exit_code in (0, 2)
        assert listing(tmp_path) == before


def test_a_dry_run_names_what_would_change(tmp_path: Path, source: Path) -> None:
    output = invoke("convert", source, tmp_path / "target", "--kv-heads", 2, "--dry-run").stdout
    for word in ("num_key_value_heads: 2", "k_proj", "free"):
        assert word in output
    assert "mlp" not in output


@pytest.mark.parametrize(
    ("options", "exit_code"),
    [
        (("convert", "SRC", "DST"), 2),
        (("convert", "SRC", "DST", "--mqa", "--kv-heads", "2"), 2),
        (("convert", "SRC", "DST", "--kv-heads", "two"), 2),
        (("convert", "SRC"), 2),
        (("convert", "SRC", "DST", "--mqa", "--no-such-option"), 2),
        (("convert", "SRC/nowhere", "DST", "--mqa"), 2),
        (("inspect", "SRC/nowhere"), 2),
        (("inspect", "SRC/config.json"), 2),
        (("transmogrify",), 2),
        (("inspect", "SRC"), 0),
        (("--version",), 0),
    ],
)
def test_exit_codes(tmp_path: Path, source: Path, options: tuple[str, ...], exit_code: int) -> None:
    words = [word.replace("SRC", str(source)).replace("DST", str(tmp_path / "target")) for word in options]
    result = invoke(*words)
    assert result.exit_code == exit_code
    assert "Traceback" not in result.output
    assert not (tmp_path / "target").exists()


def test_an_error_is_a_line_and_a_hint(tmp_path: Path, source: Path) -> None:
    failed = process("convert", source, tmp_path / "target", "--kv-heads", "5")
    assert failed.returncode == 2
    assert failed.stdout == ""
    error, hint = failed.stderr.splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")


@pytest.mark.parametrize("place", ["before", "after"])
def test_debug_shows_the_traceback(tmp_path: Path, source: Path, place: str) -> None:
    command = ["convert", str(source), str(tmp_path / "target"), "--kv-heads", "5"]
    failed = invoke(*(["--debug", *command] if place == "before" else [*command, "--debug"]))
    assert failed.exit_code == 2
    assert "Traceback" in failed.stderr
    assert "HeadCountError" in failed.stderr
    assert "error: " in failed.stderr


STREAMS = ["inspect SRC", "inspect SRC --json", "families", "estimate SRC", "--help", "--version", "convert --help"]


@pytest.mark.parametrize("command", STREAMS)
def test_a_reader_that_goes_away_is_the_environment(source: Path, command: str) -> None:
    ended = in_shell(source, f"{command} | true; exit ${{PIPESTATUS[0]}}")
    assert (ended.returncode, ended.stderr) == (3, "")


@pytest.mark.parametrize("command", STREAMS)
def test_a_full_disk_behind_stdout_is_the_environment(source: Path, command: str) -> None:
    ended = in_shell(source, f"{command} >/dev/full")
    assert (ended.returncode, ended.stderr) == (3, "error: No space left on device\n")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_started_without_a_stream(tmp_path: Path, source: Path, closed: str) -> None:
    """Some daemons start their children so; what would be printed must not end up in the files that are opened next."""
    assert invoke("convert", source, tmp_path / "usual", "--mqa").exit_code == 0
    for option in ("", "--json"):
        assert in_shell(source, f"convert SRC {tmp_path / 'bare'} --mqa --overwrite {option} {closed}").returncode == 0
        assert tree(tmp_path / "bare") == tree(tmp_path / "usual")
    assert in_shell(source, f"convert SRC {tmp_path / 'none'} --kv-heads 5 {closed}").returncode == 2


def in_shell(source: Path, command: str) -> subprocess.CompletedProcess[str]:
    script = " ".join((*COMMAND, command.replace("SRC", str(source))))
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=60)


def test_the_library_returns_what_the_command_prints(tmp_path: Path, source: Path) -> None:
    import gqaconvert

    result = gqaconvert.convert(str(source), tmp_path / "one", 2)
    printed = invoke("convert", source, tmp_path / "two", "--kv-heads", 2, "--json").stdout
    changing = ("destination", "free_bytes")
    mine, other = result.to_json(), json.loads(printed)
    assert {k: v for k, v in mine.items() if k not in changing} == {k: v for k, v in other.items() if k not in changing}
    assert result.destination == tmp_path / "one"
    with pytest.raises(gqaconvert.GqaConvertError, match="5 KV heads"):
        gqaconvert.convert(str(source), tmp_path / "three", 5)
