"""Stock classes without a setting for fewer KV heads: converted, loaded with the modelling file of the output.

As in test_parity, the judge is the stock class with each KV head overwritten by its group's mean. Every source has 8
query heads in its decoder, and an encoder with another number of heads.
"""

from __future__ import annotations

import inspect
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from typer.testing import CliRunner, Result

from gqaconvert.cli.app import app
from gqaconvert.families import get_family
from gqaconvert.families.config import ModelConfig
from gqaconvert.families.shipped import FILE, model_class, modelling_source
from tests.families.cases import BIGCODE, COMMON, VOCABULARY, randomise, tensors_of
from tests.families.reference import QUERY_HEADS, HeadStack, Layout, blocks, expanded_reference, interleaved, strided

TOLERANCE = 1e-5
CONTROL = 1e-2
NEW_TOKENS = 6
TOKENS = torch.randint(3, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))
SPOKEN = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(1))


def within(modules: str, key: str = "k_proj", value: str = "v_proj") -> Layout:
    """Separate projections of the modules whose name matches: the decoder's, not the encoder's."""

    def layout(model: PreTrainedModel, kv_heads: int) -> Iterator[HeadStack]:
        for name, module in model.named_modules():
            if re.search(modules, name):
                for kind in ("weight", "bias"):
                    if (parameter := getattr(getattr(module, key), kind)) is not None:
                        yield HeadStack("key", parameter.data.chunk(kv_heads))
                    if (parameter := getattr(getattr(module, value), kind)) is not None:
                        yield HeadStack("value", parameter.data.chunk(kv_heads))

    return layout


def conv1d(model: PreTrainedModel, kv_heads: int) -> Iterator[HeadStack]:
    """GPT-2: the columns of one matrix are all query heads, all K heads, all V heads."""
    for name, module in model.named_modules():
        if name.endswith(".attn"):
            for parameter in (module.c_attn.weight.data, module.c_attn.bias.data):
                _, keys, values = parameter.chunk(3, dim=-1)
                yield HeadStack("key", keys.chunk(kv_heads, dim=-1))
                yield HeadStack("value", values.chunk(kv_heads, dim=-1))


@dataclass(frozen=True)
class Case:
    """One stock model.

    Attributes:
        name: also the seed of its weights.
        model_type: as in ``config.json``.
        config: of the model.
        layout: where the stock module keeps its heads.
        may_change: pattern of the tensors that hold K or V.
        auto: the auto class that a user calls.
        targets: KV heads to convert to.
        head_dim: of the decoder.
        stacks: attention modules of a decoder layer that cache.
        shipped: whether the output brings our modelling file.
    """

    name: str
    model_type: str
    config: Mapping[str, Any]
    layout: Layout
    may_change: str
    auto: str = "AutoModelForCausalLM"
    targets: tuple[int, ...] = (2, 1)
    head_dim: int = 12
    stacks: int = 1
    shipped: bool = True
    config_keys: frozenset[str] = field(default=frozenset({"num_key_value_heads", "architectures", "auto_map"}))

    def build(self) -> PreTrainedModel:
        """The model in evaluation mode, the same on every call."""
        config = AutoConfig.for_model(self.model_type, **self.config)
        model: PreTrainedModel = getattr(transformers, self.auto).from_config(config, dtype=torch.float32).eval()
        randomise(model, seed=zlib.crc32(self.name.encode()))
        model.tie_weights()
        return model


MHA = {key: value for key, value in COMMON.items() if key != "num_key_value_heads"}
T5 = {
    "vocab_size": VOCABULARY, "d_model": 40, "d_kv": 12, "d_ff": 56, "num_layers": 2, "num_heads": QUERY_HEADS,
    "decoder_start_token_id": 0, "eos_token_id": None, "relative_attention_num_buckets": 8,
}  # fmt: skip
BART = {
    "vocab_size": VOCABULARY, "d_model": 96, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": QUERY_HEADS, "encoder_ffn_dim": 56, "decoder_ffn_dim": 56, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
    "max_position_embeddings": 64,
}  # fmt: skip
WHISPER = BART | {
    "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 40, "suppress_tokens": None,
    "begin_suppress_tokens": None,
}  # fmt: skip
T5_LAYOUT = within(r"^decoder\..*(SelfAttention|EncDecAttention)$", "k", "v")
T5_TENSORS = r"^decoder\..*Attention\.[kv]\.weight$"
BART_LAYOUT = within(r"decoder\.layers\.\d+\.(self_attn|encoder_attn)$")
BART_TENSORS = r"decoder\.layers\.\d+\.(self_attn|encoder_attn)\.[kv]_proj\.(weight|bias)$"
SEQ2SEQ: Any = {"auto": "AutoModelForSeq2SeqLM", "stacks": 2}

CASES: tuple[Case, ...] = (
    Case("t5_v1_0", "t5", T5, T5_LAYOUT, T5_TENSORS, **SEQ2SEQ, targets=(4, 2, 1)),
    Case(
        "t5_v1_1", "t5", T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        T5_LAYOUT, T5_TENSORS, **SEQ2SEQ,
    ),
    Case("mt5", "mt5", T5, T5_LAYOUT, T5_TENSORS, **SEQ2SEQ, targets=(2,)),
    Case("umt5", "umt5", T5, T5_LAYOUT, T5_TENSORS, **SEQ2SEQ, targets=(2,)),
    Case(
        "gpt_neox", "gpt_neox", MHA | {"rotary_pct": 0.5, "use_parallel_residual": True},
        interleaved("query_key_value"), r"\.query_key_value\.(weight|bias)$", targets=(4, 2, 1),
    ),
    Case("gpt2", "gpt2", BIGCODE, conv1d, r"\.c_attn\.(weight|bias)$", targets=(4, 2)),
    Case(
        "gpt2_one_head", "gpt2", BIGCODE, conv1d, r"\.(c_attn\.(weight|bias)|(c_fc|c_proj)\.weight)$", targets=(1,),
        shipped=False,
        config_keys=frozenset({"model_type", "architectures", "multi_query"}),
    ),
    Case(
        "gpt2_inverse_layer_scale", "gpt2", {**BIGCODE, "scale_attn_by_inverse_layer_idx": True}, conv1d,
        r"\.c_attn\.(weight|bias)$", targets=(1,),
    ),
    Case(
        "opt", "opt", MHA | {"ffn_dim": 56, "word_embed_proj_dim": 64}, within(r"\.self_attn$"),
        r"\.[kv]_proj\.(weight|bias)$",
    ),
    Case(
        "gptj", "gptj", {**BIGCODE, "rotary_dim": 4}, within(r"\.attn$"), r"\.[kv]_proj\.weight$",
    ),
    Case(
        "bloom", "bloom", {"vocab_size": VOCABULARY, "hidden_size": 96, "n_layer": 2, "n_head": QUERY_HEADS},
        interleaved("query_key_value"), r"\.query_key_value\.(weight|bias)$",
    ),
    Case(
        "mpt", "mpt",
        {
            "vocab_size": VOCABULARY, "d_model": 96, "n_layers": 2, "n_heads": QUERY_HEADS, "max_seq_len": 64,
            "attn_config": {"clip_qkv": 0.8},
        },
        blocks("Wqkv"), r"\.Wqkv\.weight$",
    ),
    Case("bart", "bart", BART, BART_LAYOUT, BART_TENSORS, **SEQ2SEQ),
    Case("whisper", "whisper", WHISPER, BART_LAYOUT, BART_TENSORS, "AutoModelForSpeechSeq2Seq", stacks=2,config_keys=frozenset({"decoder_key_value_heads", "architectures", "auto_map"})),
    Case("mbart", "mbart", BART, BART_LAYOUT, BART_TENSORS, **SEQ2SEQ, targets=(2,)),
    Case("pegasus", "pegasus", BART, BART_LAYOUT, BART_TENSORS, **SEQ2SEQ, targets=(2,)),
    Case("m2m_100", "m2m_100", BART, BART_LAYOUT, BART_TENSORS, **SEQ2SEQ, targets=(2,)),
    Case("marian", "marian", BART, BART_LAYOUT, BART_TENSORS, **SEQ2SEQ, targets=(2,)),
    Case(
        "gpt_neo", "gpt_neo",
        {
            "vocab_size": VOCABULARY, "hidden_size": 96, "num_layers": 2, "num_heads": QUERY_HEADS,
            "attention_types": [[["global", "local"], 1]], "window_size": 5, "max_position_embeddings": 64,
        },
        within(r"\.attn\.attention$"), r"\.[kv]_proj\.weight$", targets=(2,),
    ),
    Case(
        "persimmon", "persimmon", MHA, interleaved("query_key_value"), r"\.query_key_value\.(weight|bias)$",
        targets=(2,),
    ),
)  # fmt: skip
PAIRS = [pytest.param((case, target), id=f"{case.name}-{target}") for case in CASES for target in case.targets]


@dataclass(frozen=True)
class Conversion:
    """One source converted, with everything that the tests compare."""

    case: Case
    target: int
    source: PreTrainedModel
    source_folder: Path
    folder: Path
    model: PreTrainedModel
    loading: dict[str, Any]
    reference: PreTrainedModel


@pytest.fixture(scope="module", autouse=True)
def own_module_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """transformers copies an output's modelling file before it imports it: not to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", folder)
        patch.syspath_prepend(folder)
        yield


@pytest.fixture(scope="module")
def conversion(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    """The pair of case and target under test, converted once for all tests of it."""
    case, target = request.param
    root = tmp_path_factory.mktemp(case.name)
    source = case.build()
    source.save_pretrained(root / "source")
    result = _convert(root / "source", root / "converted", target)
    assert result.exit_code == 0, f"exit code {result.exit_code}: {result.output} {result.exception!r}"
    model, loading = _load(case, root / "converted")
    reference = expanded_reference(source, case.layout, QUERY_HEADS, target)
    return Conversion(case, target, source, root / "source", root / "converted", model, loading, reference)


@pytest.mark.parametrize("conversion", PAIRS, indirect=True)
def test_loads_every_tensor(conversion: Conversion) -> None:
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        assert not conversion.loading[problem], f"{problem}: {conversion.loading[problem]}"
    if conversion.case.shipped:
        assert type(conversion.model).__module__.endswith("modeling_gqaconvert")
        assert isinstance(conversion.model, type(conversion.source))
    else:
        assert not (conversion.folder / FILE).exists()
        assert type(conversion.model).__module__.startswith("transformers.models.")


@pytest.mark.parametrize("conversion", PAIRS, indirect=True)
def test_logits_are_those_of_the_pooled_heads(conversion: Conversion) -> None:
    case, target = conversion.case, conversion.target
    logits, expected = _logits(conversion.model), _logits(conversion.reference)
    largest = max(1.0, expected.abs().max().item())
    assert torch.isfinite(expected).all()
    assert (logits - expected).abs().max() <= TOLERANCE * largest
    wrong = [conversion.source]
    if target > 1:
        wrong.append(expanded_reference(conversion.source, case.layout, QUERY_HEADS, target, strided))
    for model in wrong:
        assert (logits - _logits(model)).abs().max() > CONTROL * largest


@pytest.mark.parametrize("conversion", PAIRS, indirect=True)
def test_greedy_generation_with_cache(conversion: Conversion) -> None:
    produced, expected = _generate(conversion.model), _generate(conversion.reference)
    assert produced.sequences.tolist() == expected.sequences.tolist()
    uncached = _generate(conversion.model, use_cache=False)
    assert produced.sequences.tolist() == uncached.sequences.tolist()


@pytest.mark.parametrize("conversion", PAIRS, indirect=True)
def test_cache_shrinks_by_the_factor(conversion: Conversion) -> None:
    """Bytes of the storages, not of views: a repeated head that is kept anywhere would be counted."""
    case, target = conversion.case, conversion.target
    ours, stock = (_cached(_generate(model)) for model in (conversion.model, conversion.reference))
    assert len(ours) == len(stock) == 2 * case.stacks * 2
    for tensor, full in zip(ours, stock, strict=True):
        assert tensor.shape == (full.shape[0], target, full.shape[2], case.head_dim)
        assert tensor.untyped_storage().nbytes() * QUERY_HEADS == full.untyped_storage().nbytes() * target
        largest = max(1.0, full.abs().max().item())
        repeated = tensor.repeat_interleave(QUERY_HEADS // target, dim=1)
        assert (repeated - full).abs().max() <= TOLERANCE * largest


@pytest.mark.parametrize("conversion", PAIRS, indirect=True)
def test_nothing_but_keys_and_values_changes(conversion: Conversion) -> None:
    before, after = tensors_of(conversion.source_folder), tensors_of(conversion.folder)
    assert before.keys() == after.keys()
    kept = {name for name in before if not re.search(conversion.case.may_change, name)}
    assert kept
    for name in kept:
        assert torch.equal(before[name], after[name]), name
    old, new = (json.loads((folder / "config.json").read_text()) for folder in
                (conversion.source_folder, conversion.folder))  # fmt: skip
    changed = {key for key in {*old, *new} if old.get(key) != new.get(key)}
    assert changed <= conversion.case.config_keys
    result = CliRunner().invoke(
        app, ["validate", str(conversion.source_folder), str(conversion.folder), "--level", "files"]
    )
    assert result.exit_code == 0, result.output


def _one(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


def test_without_trust_the_stock_class_refuses(tmp_path: Path) -> None:
    """It must not load with heads made up."""
    _one("t5_v1_1").build().save_pretrained(tmp_path / "source")
    assert _convert(tmp_path / "source", tmp_path / "out", 2).exit_code == 0
    with pytest.raises(RuntimeError, match="mismatched"):
        transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")


def test_saved_again_it_loads_again(tmp_path: Path) -> None:
    case = _one("gpt_neox")
    case.build().save_pretrained(tmp_path / "source")
    assert _convert(tmp_path / "source", tmp_path / "out", 2).exit_code == 0
    model, _ = _load(case, tmp_path / "out")
    model.save_pretrained(tmp_path / "again")
    again, loading = _load(case, tmp_path / "again")
    assert not loading["missing_keys"]
    assert torch.equal(_logits(model), _logits(again))


@pytest.mark.parametrize("name", ["t5_v1_1", "gpt2", "gpt_neox", "mpt"])
def test_an_output_is_converted_further(name: str, tmp_path: Path) -> None:
    case = _one(name)
    source = case.build()
    source.save_pretrained(tmp_path / "source")
    assert _convert(tmp_path / "source", tmp_path / "four", 4).exit_code == 0
    result = _convert(tmp_path / "four", tmp_path / "two", 2)
    assert result.exit_code == 0, result.output
    model, loading = _load(case, tmp_path / "two")
    assert not loading["missing_keys"]
    expected = _logits(expanded_reference(source, case.layout, QUERY_HEADS, 2))
    assert (_logits(model) - expected).abs().max() <= 2 * TOLERANCE * max(1.0, expected.abs().max().item())


def test_beam_search_and_sampled_batches_use_the_same_cache(tmp_path: Path) -> None:
    case = _one("t5_v1_0")
    source = case.build()
    source.save_pretrained(tmp_path / "source")
    assert _convert(tmp_path / "source", tmp_path / "out", 2).exit_code == 0
    model, _ = _load(case, tmp_path / "out")
    reference = expanded_reference(source, case.layout, QUERY_HEADS, 2)
    for options in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}):
        found, wanted = (_generate(m, **options).sequences.tolist() for m in (model, reference))
        assert found == wanted


def test_the_package_makes_the_class_of_the_file(tmp_path: Path) -> None:
    """Our own commands never run a checkpoint's code; what they use instead must be the same."""
    case = _one("gpt_neox")
    case.build().save_pretrained(tmp_path / "source")
    assert _convert(tmp_path / "source", tmp_path / "out", 2).exit_code == 0
    shipped, _ = _load(case, tmp_path / "out")
    config = ModelConfig.of(json.loads((tmp_path / "out" / "config.json").read_text()))
    ours = model_class(get_family("gpt_neox"), config).from_pretrained(tmp_path / "out").eval()
    assert torch.equal(_logits(shipped), _logits(ours))


@pytest.mark.parametrize(
    ("name", "target", "method"),
    [
        ("gpt_neox", 2, "mean"),
        ("gpt_neox", 2, "subspace"),
        ("gpt2", 2, "mean"),
        ("gpt2_one_head", 1, "mean"),
        ("bloom", 1, "align"),
        ("mpt", 2, "mean"),
        ("opt", 2, "subspace"),
        ("gptj", 2, "subspace"),
    ],
)
def test_validate_runs_the_models(name: str, target: int, method: str, tmp_path: Path) -> None:
    """With the class of this package, and never with the folder's file."""
    _one(name).build().save_pretrained(tmp_path / "source")
    assert _convert(tmp_path / "source", tmp_path / "out", target, "--method", method).exit_code == 0
    if (tmp_path / "out" / FILE).exists():
        (tmp_path / "out" / FILE).write_text("raise SystemExit('run')\n")
    arguments = ["validate", str(tmp_path / "source"), str(tmp_path / "out"), "--level", "logits", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    passed = {check["name"] for check in json.loads(result.stdout)["checks"] if check["status"] == "passed"}
    assert {"logits.loading", "logits.prefill", "logits.decode", "logits.kv-cache"} <= passed


def test_a_class_without_counterpart_is_refused(tmp_path: Path) -> None:
    _one("opt").build().save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["OPTForSequenceClassification"]}))
    result = _convert(tmp_path / "source", tmp_path / "out", 2)
    assert result.exit_code == 2
    assert "OPTForSequenceClassification" in result.stderr


def test_every_shipped_family_writes_a_file_that_compiles() -> None:
    from gqaconvert.families import all_families

    shipping = [family for family in all_families() if any(form.shipped for form in family.forms)]
    assert {family.name for family in shipping} <= {case.model_type for case in CASES}
    for family in shipping:
        compile(modelling_source(family), FILE, "exec")


def _convert(source: Path, destination: Path, kv_heads: int, *more: str) -> Result:
    arguments = ["convert", str(source), str(destination), "--kv-heads", str(kv_heads), "--quiet", *more]
    return CliRunner().invoke(app, arguments)


def _load(case: Case, folder: Path) -> tuple[PreTrainedModel, dict[str, Any]]:
    model, loading = getattr(transformers, case.auto).from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, dtype=torch.float32
    )
    return model.eval(), loading


def _inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    if "input_features" in inspect.signature(model.forward).parameters:
        return {"input_features": SPOKEN}
    return {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}


@torch.no_grad()
def _logits(model: PreTrainedModel) -> Tensor:
    inputs = _inputs(model)
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = TOKENS.flip(0)
    logits: Tensor = model(**inputs, use_cache=False).logits
    return logits


@torch.no_grad()
def _generate(model: PreTrainedModel, **options: Any) -> Any:  # noqa: ANN401
    stock: Any = model
    arguments = {"use_cache": True, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}
    return stock.generate(**_inputs(model), **{**arguments, **options}, return_dict_in_generate=True)


def _cached(output: Any) -> list[Tensor]:  # noqa: ANN401
    """Every cached tensor, of self-attention and of cross-attention."""
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    parts = [getattr(cache, name) for name in ("self_attention_cache", "cross_attention_cache") if hasattr(cache, name)]
    return [tensor for part in parts or [cache] for layer in part.layers for tensor in (layer.keys, layer.values)]
