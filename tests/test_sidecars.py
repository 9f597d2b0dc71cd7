"""The files beside the weights: what is carried, what is not, and the model card."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import llama_checkpoint
from tests.support.runs import SINGLE, convert, fails, invoke, read_json, tree

GENERATED = {"config.json", SINGLE, "README.md", "gqaconvert.json"}

CARRIED: dict[str, str | bytes] = {
    "generation_config.json": '{"max_length": 5}',
    "tokenizer.json": "{}",
    "tokenizer_config.json": "{}",
    "tokenizer.model": b"\x00\x01binary",
    "special_tokens_map.json": "{}",
    "added_tokens.json": "{}",
    "vocab.json": "{}",
    "merges.txt": "a b",
    "chat_template.jinja": "{{ raise_exception('not run') }}",
    "additional_chat_templates/tool use.jinja": "{% tools %}",
    "preprocessor_config.json": "{}",
    "LICENSE": "text",
    "LICENSE.txt": "text",
    "USE_POLICY.md": "text",
    "modeling_custom.py": "raise SystemExit('custom code was run')",
    "configuration_custom.py": "raise SystemExit('custom code was run')",
    "deep/nested/folder/with.any": b"\xff\xfe",
    "assets/Überblick 图.png": b"\x89PNG",
    "empty": b"",
    "eval.yaml": "a: 1",
    "1_Pooling/config.json": '{"word_embedding_dimension": 3}',
}
LEFT_OUT: dict[str, str | bytes] = {
    "pytorch_model.bin": b"pickle",
    "pytorch_model-00001-of-00002.bin": b"pickle",
    "pytorch_model.bin.index.json": "{}",
    "model.pth": b"pickle",
    "optimizer.pt": b"state",
    "scheduler.pt": b"state",
    "rng_state_0.pth": b"state",
    "trainer_state.json": "{}",
    "training_args.bin": b"pickle",
    "adapter_config.json": "{}",
    "adapter_model.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "tf_model.h5": b"h5",
    "flax_model.msgpack": b"mp",
    "model.gguf": b"GGUF",
    "onnx/model.onnx": b"onnx",
    "onnx/model.onnx_data": b"onnx",
    "original/consolidated.00.pth": b"pickle",
    "original/params.json": "{}",
    "old/model-00001-of-00002.safetensors": b"\x02\0\0\0\0\0\0\0{}",
    "old/model.safetensors.index.json": "{}",
}
HIDDEN: dict[str, str | bytes] = {
    ".cache/huggingface/download/x.metadata": "x",
    ".git/config": "[remote]",
    ".gitattributes": "*.safetensors filter=lfs",
    ".env": "SECRET=1",
    "deep/.hidden/x": "x",
}


def data(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def test_what_is_carried_and_what_is_not(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {**CARRIED, **LEFT_OUT, **HIDDEN}
    source = llama_checkpoint(tmp_path / "source", extra_sidecars=files)
    result = invoke("convert", source, tmp_path / "target", "--mqa")
    assert result.exit_code == 0, result.stderr
    after = tree(tmp_path / "target")
    assert {name: after.get(name) for name in CARRIED} == {name: data(content) for name, content in CARRIED.items()}
    for name in LEFT_OUT:
        assert name not in after
    for name in HIDDEN:
        if "/." in f"/{name.rpartition('/')[0]}":
            assert name not in after, "hidden folders are a tool's, not the model's"
    assert after.keys() - CARRIED.keys() - GENERATED <= HIDDEN.keys()
    assert "not carried over" in result.stderr


def test_what_is_left_out_is_named_with_the_reason(tmp_path: Path) -> None:
    import json

    source = llama_checkpoint(tmp_path / "source", extra_sidecars={**CARRIED, **LEFT_OUT})
    result = json.loads(invoke("convert", source, tmp_path / "target", "--mqa", "--json").stdout)
    assert result["left_out"].keys() == LEFT_OUT.keys()
    assert all(result["left_out"].values())
    assert set(result["files"]) == CARRIED.keys()


def test_custom_code_is_data(tmp_path: Path) -> None:
    """auto_map stays, the code is carried, and nothing of it runs."""
    import json

    code = "import pathlib; pathlib.Path(__file__).with_name('ran').touch()"
    source = llama_checkpoint(tmp_path / "source", extra_sidecars={"modeling_x.py": code})
    config = read_json(source / "config.json") | {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}
    (source / "config.json").write_text(json.dumps(config))
    target = convert(source, tmp_path / "target", "--mqa")
    assert read_json(target / "config.json")["auto_map"] == {"AutoModelForCausalLM": "modeling_x.X"}
    assert (target / "modeling_x.py").read_text() == code
    assert not list(tmp_path.rglob("ran"))


def test_the_attributes_of_git_are_carried(tmp_path: Path) -> None:
    """.gitattributes tells which files are LFS: a pushed copy without it would be broken."""
    source = llama_checkpoint(tmp_path / "source", extra_sidecars={".gitattributes": "*.safetensors filter=lfs"})
    assert (convert(source, tmp_path / "target", "--mqa") / ".gitattributes").exists()


# ---- Links


@pytest.mark.parametrize("relative", [False, True])
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, relative: bool) -> None:
    """Contents are copied: a link to a secret would publish it."""
    (tmp_path / "secret").write_text("key")
    source = llama_checkpoint(tmp_path / "source")
    (source / "notes.txt").symlink_to(Path("..") / "secret" if relative else tmp_path / "secret")
    message = fails(2, "convert", source, tmp_path / "target", "--mqa")
    assert "notes.txt" in message
    assert {path.name for path in tmp_path.iterdir()} == {"source", "secret"}


@pytest.mark.parametrize("name", ["README.md", "README.source.md", "config.json", "gqaconvert.json"])
def test_a_link_out_in_place_of_a_file_that_is_read_is_refused_or_not_copied(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("top secret key")
    source = llama_checkpoint(tmp_path / "source")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(tmp_path / "secret")
    invoke("convert", source, tmp_path / "target", "--mqa")
    assert not any(b"top secret" in content for content in tree(tmp_path / "target").values())


def test_a_linked_folder_is_not_followed_out(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key").write_text("top secret")
    source = llama_checkpoint(tmp_path / "source")
    (source / "assets").symlink_to(tmp_path / "private")
    invoke("convert", source, tmp_path / "target", "--mqa")
    assert not any(b"top secret" in content for content in tree(tmp_path / "target").values())


def test_a_link_inside_the_folder_becomes_a_file(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", extra_sidecars={"tokenizer.json": "{}"})
    (source / "alias.json").symlink_to("tokenizer.json")
    target = convert(source, tmp_path / "target", "--mqa")
    assert (target / "alias.json").read_text() == "{}"
    assert not (target / "alias.json").is_symlink()


@pytest.mark.parametrize("name", ["notes.txt", "config.json", SINGLE])
def test_a_dangling_link_is_named(tmp_path: Path, name: str) -> None:
    source = llama_checkpoint(tmp_path / "source")
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(tmp_path / "gone")
    for command in (("convert", source, tmp_path / "target", "--mqa"), ("inspect", source)):
        assert name in fails(2, *command)
    assert not (tmp_path / "target").exists()


def hub_snapshot(folder: Path) -> Path:
    """A checkpoint as the Hub's client caches it: links to blobs, in a folder named after the commit."""
    plain = llama_checkpoint(folder / "plain", extra_sidecars={"README.md": "---\nlicense: mit\n---\n# M"})
    repo = folder / "hub" / "models--org--some-model"
    snapshot = repo / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for number, (name, content) in enumerate(sorted(tree(plain).items())):
        (repo / "blobs" / str(number)).write_bytes(content)
        (snapshot / name).symlink_to(Path("../../blobs") / str(number))
    return snapshot


def test_a_snapshot_of_the_hubs_cache_is_a_source_of_its_own_name(tmp_path: Path) -> None:
    snapshot = hub_snapshot(tmp_path)
    target = convert(snapshot, tmp_path / "target", "--kv-heads", 2)
    fields = front_matter(target)
    assert fields["base_model"] == "org/some-model"
    assert fields["license"] == "mit"
    record = read_json(target / "gqaconvert.json")["source"]
    assert record["revision"] == "0123456789" * 4
    assert "0123456789" * 4 in (target / "README.md").read_text()
    assert not any(path.is_symlink() for path in target.rglob("*"))


# ---- The model card


def front_matter(folder: Path) -> dict[str, Any]:
    """The card's fields as the Hub's own client reads them."""
    from huggingface_hub import ModelCard

    fields: dict[str, Any] = ModelCard.load(folder / "README.md").data.to_dict()
    return fields


CARD = """---
license: other
license_name: some-licence
license_link: https://example.com/licence
language:
- en
- de
tags:
- chat
- é
pipeline_tag: text-generation
base_model: someone/else
datasets:
- someone/data
model-index:
- name: M
  results: []
---
# The source's card
"""


def test_the_sources_card_makes_room(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", extra_sidecars={"README.md": CARD})
    target = convert(source, tmp_path / "target", "--kv-heads", 2)
    assert (target / "README.source.md").read_text() == CARD
    fields = front_matter(target)
    assert fields["license"] == "other"
    assert fields["license_name"] == "some-licence"
    assert fields["license_link"] == "https://example.com/licence"
    assert fields["language"] == ["en", "de"]
    assert {"chat", "é", "gqaconvert"} <= set(fields["tags"])
    assert fields["pipeline_tag"] == "text-generation"
    assert fields["library_name"] == "transformers"
    assert "model-index" not in fields, "the source's results are not this model's"
    assert "base_model" not in fields, "a folder's name is no repository"


def test_the_card_tells_the_figures(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source")
    card = (convert(source, tmp_path / "target", "--kv-heads", 2) / "README.md").read_text()
    assert "2305.13245" in card
    assert "mean" in card
    # cache a token: 2 layers, K and V, 6 or 2 heads, 8 numbers, 4 bytes
    assert f"{2 * 2 * 6 * 8 * 4} bytes" in card
    assert f"{2 * 2 * 2 * 8 * 4} bytes" in card
    assert str(tmp_path) not in card, "the place on somebody's disk is nobody's business"


def test_a_second_conversion_keeps_the_first_card(tmp_path: Path) -> None:
    source = llama_checkpoint(tmp_path / "source", extra_sidecars={"README.md": CARD})
    one = convert(source, tmp_path / "one", "--kv-heads", 3)
    two = convert(one, tmp_path / "two", "--kv-heads", 1)
    assert (two / "README.source.md").read_text() == CARD
    assert front_matter(two)["license"] == "other"
    assert front_matter(two)["tags"].count("gqaconvert") == 1


@pytest.mark.parametrize(
    "card",
    [
        "", "no front matter", "---\n", "---\nlicense: [\n---\n", "---\n- a list\n---\n", "---\ntext\n---\n",
        "---\nlicense: {a: 1}\ntags: 5\nlanguage: null\n---\n", "---\r\nlicense: mit\r\n---\r\n", b"\xff\xfe---",
        "---\nlicense: !!python/object/apply:os.system ['touch ran']\n---\n",
    ],
)  # fmt: skip
def test_any_card_is_survived(tmp_path: Path, card: str | bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    source = llama_checkpoint(tmp_path / "source", extra_sidecars={"README.md": card})
    target = convert(source, tmp_path / "target", "--mqa")
    assert (target / "README.source.md").read_bytes() == data(card)
    assert "gqaconvert" in front_matter(target)["tags"]
    assert not (tmp_path / "ran").exists()
