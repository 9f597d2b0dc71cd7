"""The JSON that programs read is what the published schemas say."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, ValidationError

from tests.support.checkpoints import llama_checkpoint, write_safetensors
from tests.support.runs import convert, edit_config, invoke, read_json

NAMES = ("inspect-1", "convert-1", "provenance-1")


def schema(name: str) -> Any:  # noqa: ANN401
    return json.loads(files("gqaconvert").joinpath("schemas", f"{name}.json").read_text(encoding="utf-8"))


def validate(document: object, name: str) -> None:
    Draft202012Validator(schema(name)).validate(document)


def printed(*arguments: object) -> Any:  # noqa: ANN401
    return json.loads(invoke(*arguments, "--json").stdout)


@pytest.mark.parametrize("name", NAMES)
def test_schemas_are_schemas(name: str) -> None:
    document = schema(name)
    assert document["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    Draft202012Validator.check_schema(document)
    assert document["additionalProperties"] is False
    for key, value in document["properties"].items():
        assert key == "schema" or value.keys() & {"description", "properties"}, key


@pytest.mark.parametrize("name", NAMES)
def test_schemas_refuse_what_they_do_not_know(tmp_path: Path, name: str) -> None:
    source = llama_checkpoint(tmp_path / "source")
    document = {
        "inspect-1": lambda: printed("inspect", source),
        "convert-1": lambda: printed("convert", source, tmp_path / "target", "--mqa"),
        "provenance-1": lambda: read_json(convert(source, tmp_path / "target", "--mqa") / "gqaconvert.json"),
    }[name]()
    validate(document, name)
    for wrong in (document | {"surprise": 1}, document | {"schema": "other/1"}, {**document, "source": 5}):
        with pytest.raises(ValidationError):
            validate(wrong, name)
    for key in document:
        with pytest.raises(ValidationError):
            validate({other: value for other, value in document.items() if other != key}, name)


def test_inspect(tmp_path: Path) -> None:
    plain = llama_checkpoint(tmp_path / "plain", shards=3, bias=True)
    validate(printed("inspect", plain), "inspect-1")
    validate(printed("inspect", plain, "--check"), "inspect-1")
    validate(printed("inspect", convert(plain, tmp_path / "target", "--mqa")), "inspect-1")
    (plain / "model-00002-of-00003.safetensors").unlink()
    broken = printed("inspect", plain)
    assert broken["problems"]
    validate(broken, "inspect-1")


@pytest.mark.parametrize("model_type", ["unheard_of", "codegen", "deepseek_v3", "mamba", "", None])
def test_inspect_of_what_cannot_be_converted(tmp_path: Path, model_type: str | None) -> None:
    source = llama_checkpoint(tmp_path / "source")
    edit_config(source, model_type=model_type)
    document = printed("inspect", source)
    assert document["convertible"] is False
    validate(document, "inspect-1")


@pytest.mark.parametrize(
    "options", [(), ("--method", "random", "--seed", "-3"), ("--dtype", "float16", "--max-shard-size", "20KB")]
)
def test_convert_and_its_record(tmp_path: Path, options: tuple[str, ...]) -> None:
    source = llama_checkpoint(tmp_path / "source", shards=2, extra_sidecars={"a.bin": b"x", "README.md": "#"})
    plan = printed("convert", source, tmp_path / "one", "--kv-heads", 2, "--dry-run", *options)
    validate(plan, "convert-1")
    validate(printed("convert", source, tmp_path / "one", "--kv-heads", 2, *options), "convert-1")
    validate(read_json(tmp_path / "one" / "gqaconvert.json"), "provenance-1")
    second = convert(tmp_path / "one", tmp_path / "two", "--mqa", "--family", "llama")
    record = read_json(second / "gqaconvert.json")
    validate(record, "provenance-1")
    validate(record["source"]["provenance"], "provenance-1")


def test_a_finished_conversion_must_name_its_hashes(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source")
    plan = printed("convert", source, tmp_path / "target", "--mqa", "--dry-run")
    with pytest.raises(ValidationError):
        validate(plan | {"dry_run": False, "resumed_shards": [], "sites": [], "commit_url": None}, "convert-1")


def test_odd_documents_validate(tmp_path: Path) -> None:
    """A foreign gqaconvert.json is shown as it is; a file of other types has no floats."""
    import torch

    source = llama_checkpoint(tmp_path / "source", extra_sidecars={"gqaconvert.json": '{"other": 1}'})
    validate(printed("inspect", source), "inspect-1")
    write_safetensors(source / "model.safetensors", {"x": torch.zeros(3, dtype=torch.int8)})
    validate(printed("inspect", source), "inspect-1")
