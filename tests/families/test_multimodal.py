"""Wrappers of a vision tower and a text decoder: the decoder's heads are merged, the tower keeps every byte."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from typer.testing import CliRunner, Result

from gqaconvert.cli.app import app
from tests.families.cases import COMMON, VOCABULARY, randomise, tensors_of
from tests.families.reference import QUERY_HEADS, expanded_reference
from tests.families.test_shipped import within

TOLERANCE = 1e-5
CONTROL = 1e-2
TARGET = 2
IMAGE = VOCABULARY - 1
TOKENS = torch.randint(3, IMAGE, (2, 9), generator=torch.Generator().manual_seed(0))
PIXELS = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))

TEXT: Mapping[str, Any] = {**COMMON, "pad_token_id": 0}
VISION: Mapping[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip
MROPE = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 10000.0}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "out_hidden_size": 96, "num_heads": 4, "patch_size": 8,
               "intermediate_size": 40}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One wrapper.

    Attributes:
        name: also the seed of its weights.
        stock: the class, without ``ForConditionalGeneration``.
        config: of the whole.
        decoder: pattern of the module names of the decoder's attention.
        image_tokens: tokens that stand for one image of `PIXELS`; 0 where the test passes none.
        more: further inputs beside an image.
    """

    name: str
    stock: str
    config: Mapping[str, Any]
    decoder: str = r"language_model\.layers\.\d+\.self_attn$"
    image_tokens: int = 0
    more: Mapping[str, Tensor] = field(default_factory=dict)

    def build(self) -> PreTrainedModel:
        """The model in evaluation mode, the same on every call."""
        config = getattr(transformers, f"{self.stock}Config")(**self.config)
        model: PreTrainedModel = self.model_class(config).eval()
        randomise(model, seed=zlib.crc32(self.name.encode()))
        model.tie_weights()
        return model

    @property
    def model_class(self) -> Any:  # noqa: ANN401
        """The stock class."""
        return getattr(transformers, f"{self.stock}ForConditionalGeneration")


CASES = (
    Case(
        "llava", "Llava",
        {
            "text_config": {"model_type": "llama", "head_dim": 16, **TEXT},
            "vision_config": {"model_type": "clip_vision_model", "projection_dim": 32, **VISION},
            "image_token_index": IMAGE,
        },
        image_tokens=4,
    ),
    Case(
        "mistral3", "Mistral3",
        {
            "text_config": {"model_type": "mistral", "head_dim": 16, **TEXT},
            "vision_config": {"model_type": "pixtral", **VISION},
            "image_token_index": IMAGE,
        },
    ),
    Case(
        "paligemma", "PaliGemma",
        {
            "text_config": {"model_type": "gemma", "head_dim": 16, **TEXT},
            "vision_config": {
                "model_type": "siglip_vision_model", "projection_dim": 96, "vision_use_head": False, **VISION,
            },
            "projection_dim": 96, "image_token_index": IMAGE,
        },
        image_tokens=4,
    ),
    Case(
        "gemma3", "Gemma3",
        {
            "text_config": {"head_dim": 16, **TEXT},
            "vision_config": {"vision_use_head": False, **VISION},
            "mm_tokens_per_image": 4, "image_token_index": IMAGE,
        },
        image_tokens=4,
    ),
    Case(
        "qwen2_vl", "Qwen2VL",
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {"depth": 2, "embed_dim": 32, "hidden_size": 96, "num_heads": 4, "patch_size": 8},
        },
    ),
    Case(
        "qwen2_5_vl", "Qwen2_5_VL",
        {"text_config": {**TEXT, "rope_parameters": MROPE}, "vision_config": {**QWEN_VISION}},
    ),
    Case(
        "qwen3_vl", "Qwen3VL",
        {
            "text_config": {**TEXT, "head_dim": 12, "rope_parameters": MROPE},
            "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        },
    ),
    Case(
        "idefics2", "Idefics2",
        {
            "text_config": {"model_type": "mistral", **TEXT}, "vision_config": VISION,
            "perceiver_config": {
                "hidden_size": 96, "resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 4,
                "num_key_value_heads": 2, "resampler_head_dim": 8,
            },
            "image_token_id": IMAGE,
        },
        decoder=r"text_model\.layers\.\d+\.self_attn$",
    ),
    Case(
        "idefics3", "Idefics3",
        {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION, "image_token_id": IMAGE},
        decoder=r"text_model\.layers\.\d+\.self_attn$",
    ),
    Case(
        "smolvlm", "SmolVLM",
        {"text_config": {"model_type": "llama", **TEXT}, "vision_config": VISION, "image_token_id": IMAGE},
        decoder=r"text_model\.layers\.\d+\.self_attn$",
    ),
    Case(
        "mllama", "Mllama",
        {
            "text_config": {
                **TEXT, "num_hidden_layers": 3, "cross_attention_layers": [1], "bos_token_id": 1, "eos_token_id": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_global_layers": 1,
                "attention_heads": 4, "image_size": 16, "patch_size": 8, "vision_output_dim": 64,
                "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]], "max_num_tiles": 1,
            },
            "image_token_index": IMAGE,
        },
        decoder=r"language_model\.layers\.\d+\.(self|cross)_attn$",
        more={
            "pixel_values": PIXELS[:, None, None], "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long),
            "cross_attention_mask": torch.ones(2, 9, 1, 1, dtype=torch.long),
        },
    ),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
OF_DECODER = r"(language_model|text_model|^model)\.(model\.)?layers\.\d+\.(self|cross)_attn\.[kv]_proj\.(weight|bias)$"


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in CASES])
def test_only_the_decoder_shares_heads(case: Case, tmp_path: Path) -> None:
    source = case.build()
    source.save_pretrained(tmp_path / "source")
    result = _convert(tmp_path / "source", tmp_path / "out")
    assert result.exit_code == 0, result.output
    model, loading = case.model_class.from_pretrained(tmp_path / "out", output_loading_info=True)
    model.eval()
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    reference = expanded_reference(source, within(case.decoder), QUERY_HEADS, TARGET)

    found, expected = _logits(model, case), _logits(reference, case)
    largest = max(1.0, expected.abs().max().item())
    assert (found - expected).abs().max() <= TOLERANCE * largest
    assert (found - _logits(source, case)).abs().max() > CONTROL * largest
    assert _generated(model) == _generated(reference)
    with torch.no_grad():
        output = model(TOKENS, use_cache=True)
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    kept = [layer.keys for layer in cache.layers if getattr(layer, "keys", None) is not None and layer.keys.numel()]
    assert kept
    assert {keys.shape[1] for keys in kept} == {TARGET}

    before, after = tensors_of(tmp_path / "source"), tensors_of(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if re.search(OF_DECODER, name)}
    assert any("vision" in name or "visual" in name for name in before.keys() - changed)
    old, new = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("source", "out"))
    old["text_config"]["num_key_value_heads"] = TARGET
    assert new == old
    check = CliRunner().invoke(app, ["validate", str(tmp_path / "source"), str(tmp_path / "out"), "--level", "files"])
    assert check.exit_code == 0, check.output


@pytest.mark.parametrize("name", ["llava", "mllama", "idefics2"])
def test_equal_heads_merge_without_loss(name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    planted = expanded_reference(case.build(), within(case.decoder), QUERY_HEADS, TARGET)
    planted.save_pretrained(tmp_path / "source")
    result = _convert(tmp_path / "source", tmp_path / "out", "--method", "subspace")
    assert result.exit_code == 0, result.output
    expected = _logits(planted, case)
    found = _logits(case.model_class.from_pretrained(tmp_path / "out").eval(), case)
    assert (found - expected).abs().max() <= 2e-5 * max(1.0, expected.abs().max().item())


def test_a_flat_config_is_changed_where_it_is_flat(tmp_path: Path) -> None:
    """Qwen2-VL on the Hub has the decoder's keys at the top level."""
    case = BY_NAME["qwen2_vl"]
    source = case.build()
    source.save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    document = json.loads(path.read_text())
    text = document.pop("text_config")
    path.write_text(json.dumps({**text, **document, "model_type": "qwen2_vl"}))
    assert _convert(tmp_path / "source", tmp_path / "out").exit_code == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_key_value_heads"] == TARGET
    model = case.model_class.from_pretrained(tmp_path / "out").eval()
    expected = _logits(expanded_reference(source, within(case.decoder), QUERY_HEADS, TARGET), case)
    assert (_logits(model, case) - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_a_text_config_that_omits_what_its_class_assumes(tmp_path: Path) -> None:
    """LLaVA's on the Hub names no number of heads: 32 for Llama."""
    config = {**BY_NAME["llava"].config}
    text = {key: value for key, value in config["text_config"].items() if "heads" not in key}
    config["text_config"] = {**text, "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 4}
    Case("few_keys", "Llava", config).build().save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    document = json.loads(path.read_text())
    for key in ("num_attention_heads", "num_key_value_heads"):
        del document["text_config"][key]
    path.write_text(json.dumps(document))
    assert _convert(tmp_path / "source", tmp_path / "out").exit_code == 0
    stock: Any = transformers.LlavaForConditionalGeneration
    model, loading = stock.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["mismatched_keys"]
    assert model.config.text_config.num_key_value_heads == TARGET


def test_assumed_heads_are_those_of_the_config_classes() -> None:
    from gqaconvert.families import all_families

    for family in all_families():
        if family.assumed_heads is not None:
            assert transformers.AutoConfig.for_model(family.name).num_attention_heads == family.assumed_heads


def _convert(source: Path, destination: Path, *more: str) -> Result:
    arguments = ["convert", str(source), str(destination), "--kv-heads", str(TARGET), "--quiet", *more]
    return CliRunner().invoke(app, arguments)


@torch.no_grad()
def _logits(model: Any, case: Case) -> Tensor:  # noqa: ANN401
    """With an image where the wrapper takes one as plain pixels, so that its tower counts too."""
    tokens, more = TOKENS.clone(), dict(case.more)
    if case.image_tokens:
        tokens[:, 1 : 1 + case.image_tokens] = IMAGE
        more["pixel_values"] = PIXELS
        more["token_type_ids"] = (tokens == IMAGE).long()
        if "token_type_ids" not in model.forward.__code__.co_varnames and case.name == "llava":
            del more["token_type_ids"]
    logits: Tensor = model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False, **more).logits
    return logits


@torch.no_grad()
def _generated(model: Any) -> list[list[int]]:  # noqa: ANN401
    produced: list[list[int]] = model.generate(
        TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=5, do_sample=False, use_cache=True
    ).tolist()
    return produced
