"""The command: its answers, its refusals, its files."""

import csv
import io
import json
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import transformers
from jsonschema import Draft202012Validator

from tests.kvcache.test_golden import DEEPSEEK_V3, LLAMA2_7B, MIXTRAL, WHISPER_V3
from tests.support.runs import fails, invoke, process

GIB = 2**30
LLAMA2 = {**LLAMA2_7B, "vocab_size": 32_000, "intermediate_size": 11_008, "max_position_embeddings": 4096,
          "dtype": "float16", "tie_word_embeddings": False}  # fmt: skip
EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-llama"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return bare(tmp_path, LLAMA2)


def bare(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def answer(*arguments: object) -> Any:  # noqa: ANN401
    result = invoke("estimate", *arguments, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    schema = json.loads(files("gqaconvert").joinpath("schemas", "estimate-1.json").read_text(encoding="utf-8"))
    Draft202012Validator(schema).validate(document)
    return document


def test_all_legal_counts_side_by_side(config: Path) -> None:
    rows = answer(config, "--context", "4k", "--batch", "1,8")["rows"]
    found = {(row["num_key_value_heads"], row["batch"]): row["cache_bytes"] for row in rows}
    assert found == {(heads, batch): 2**31 * batch * heads // 32 for heads in (32, 16, 8, 4, 2, 1) for batch in (1, 8)}


def test_what_fits_beside_the_weights(config: Path) -> None:
    # Llama-2-7B's index says 13476835328 bytes in float16, 4096 of which are rotary buffers (32 layers x 64 x 2). A
    # sequence of 4096 tokens takes 2 GiB, or 1/4 of it with 8 KV heads.
    document = answer(config, "--context", "4k", "--gpu", "24GiB", "--kv-heads", "32,8", "--utilisation", "1")
    assert document["weights"]["bytes"] == 13_476_831_232
    left = 24 * GIB - 13_476_831_232
    full, grouped = document["fits"]
    assert full["largest_batch"] == {"4096": left // 2**31}
    # K and V of 32 layers lose three quarters of 2 x 4096 x 4096 numbers.
    saved = 32 * 2 * 4096 * 4096 * 2 * 3 // 4
    assert document["weights"]["bytes_by_kv_heads"] == {"32": 13_476_831_232, "8": 13_476_831_232 - saved}
    assert grouped["largest_batch"] == {"4096": (left + saved) // 2**29}
    assert full["longest_context"] == {"1": 4096}


def test_the_longest_context_is_the_last_that_fits(config: Path) -> None:
    document = answer(config, "--context", "4k", "--batch", "32", "--gpu", "24GiB", "--kv-heads", "32")
    (fit,) = document["fits"]
    token, longest = 32 * 2**19, fit["longest_context"]["32"]
    assert longest * token <= fit["cache_budget_per_device"] < (longest + 1) * token


def test_weights_that_do_not_fit(config: Path) -> None:
    (fit,) = answer(config, "--gpu", "8GiB", "--kv-heads", "32")["fits"]
    assert fit["cache_budget_per_device"] < 0
    assert set(fit["largest_batch"].values()) == set(fit["longest_context"].values()) == {0}


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 12}),
        ("qwen3", {"attention_bias": True}),
    ],
)
def test_parameters_of_a_bare_config(tmp_path: Path, kind: str, values: dict[str, Any]) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
             "num_hidden_layers": 3, "vocab_size": 40}  # fmt: skip
    model_config = transformers.AutoConfig.for_model(kind, **shape, **values)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(model_config)
    document = answer(bare(tmp_path, {**model_config.to_diff_dict(), **values, "dtype": "float32"}))
    assert document["weights"]["parameters"] == model.num_parameters()
    assert document["weights"]["bytes"] == 4 * model.num_parameters()


def test_the_weights_of_a_conversion_are_foretold(tmp_path: Path) -> None:
    document = answer(EXAMPLE)
    for heads in ("4", "1"):
        assert invoke("convert", EXAMPLE, tmp_path / heads, "--kv-heads", heads, "--quiet").exit_code == 0
        assert answer(tmp_path / heads)["weights"]["bytes"] == document["weights"]["bytes_by_kv_heads"][heads]


def test_the_bound_on_decoding_has_the_shape_of_the_papers_figure(tmp_path: Path) -> None:
    """Figure 6: with a large cache time grows in the KV heads, little from 1 to 8 and steeply to all."""
    path = bare(tmp_path, {**LLAMA2, "hidden_size": 4096})
    rows = answer(path, "--context", "2k", "--batch", "32", "--gpu", "tpu-v4", "--tp", "8", "--block", "1")["rows"]
    seconds = {row["num_key_value_heads"]: row["decode"]["seconds"] for row in rows}
    assert seconds[1] <= seconds[8] < seconds[16] < seconds[32]
    assert seconds[8] - seconds[1] < (seconds[32] - seconds[8]) / 3
    mha = next(row for row in rows if row["num_key_value_heads"] == 32)
    # Read once: (weights without the input table + 32 sequences of 1 GiB) / 8 devices, at 1.2e12 bytes a second.
    expected = (13_476_831_232 - 32_000 * 4096 * 2 + 32 * GIB) / 8 / 1.2e12
    assert mha["decode"]["seconds"] == pytest.approx(expected, rel=1e-9)
    assert mha["decode"]["bound_by"] == "memory"


def test_the_price_of_uptraining(config: Path) -> None:
    cost = answer(config, "--alpha", "0.05", "--pretrain-tokens", "2T", "--gpu", "a100")["uptraining"]
    assert cost["tokens"] == 10**11
    assert cost["flops"] == 6 * 6_738_415_616 * 10**11
    assert cost["gpu_hours"] == pytest.approx(6 * 6_738_415_616 * 1e11 / (312e12 * 0.4) / 3600)


def test_policies_are_counted(config: Path) -> None:
    (row,) = answer(config, "--context", "4k", "--kv-heads", "32", "--policy", "l2:0.1")["rows"]
    assert row["effective_factor"] == pytest.approx((2 + 0.1 * 30) / 32, abs=1e-3)
    # 29 evicted layers, two spared, and the one in work at full length.
    assert row["prefill_peak_bytes"] == (3 * 4096 + 29 * 410) * 16_384


def test_a_model_without_kv_heads(tmp_path: Path) -> None:
    path = bare(tmp_path, {**DEEPSEEK_V3, "n_routed_experts": 256})
    document = answer(path, "--context", "32k", "--gpu", "h200", "--tp", "8", "--weights", "700GB")
    (row,) = document["rows"]
    assert row["num_key_value_heads"] is None
    assert row["cache_bytes_per_device"] == 2196 * 2**20
    assert row["decode"] is None
    assert any("mixture" in note for note in document["notes"])
    assert "no KV heads" in fails(2, "estimate", path, "--kv-heads", "8")


def test_an_encoder(tmp_path: Path) -> None:
    path = bare(tmp_path, WHISPER_V3)
    assert answer(path)["rows"][0]["parts"]["cross"] == 1500 * 163_840
    assert answer(path, "--encoder-tokens", "10")["rows"][0]["parts"]["cross"] == 10 * 163_840


REFUSED: list[dict[str, Any]] = [
    {"model_type": "zamba2"},
    {"model_type": "deepseek_v32", "kv_lora_rank": 512},
    {**LLAMA2, "kv_lora_rank": 512},
    {**LLAMA2, "sliding_window": 4096},
    {**LLAMA2, "attention_chunk_size": 8192},
    {**LLAMA2, "layer_types": ["full_attention"] * 31 + ["compressed_sparse_attention"]},
    {**LLAMA2, "layer_types": ["full_attention"] * 31},
    {**LLAMA2, "layer_types": ["sliding_attention"] * 32},
    {**LLAMA2, "layer_types": ["linear_attention"] * 32},
    {**MIXTRAL, "sliding_window": "4096"},
    {**LLAMA2, "num_key_value_heads": 5},
    {
        "model_type": "gemma3_text",
        **{k: v for k, v in LLAMA2.items() if k != "model_type"},
        "sliding_window_pattern": 0,
    },
    {**LLAMA2, "num_attention_heads": None},
]


@pytest.mark.parametrize("document", REFUSED)
def test_caches_that_are_not_known_are_refused(tmp_path: Path, document: dict[str, Any]) -> None:
    fails(2, "estimate", bare(tmp_path, document))


@pytest.mark.parametrize(
    "options",
    [
        ("--context", "0"), ("--context", "4x"), ("--batch", "-1"), ("--kv-heads", "3"), ("--kv-dtype", "fp3"),
        ("--tp", "5"), ("--policy", "lru:7"), ("--policy", "l2:0.5:skip=99"), ("--gpu", "fast"), ("--alpha", "0.05"),
        ("--alpha", "2", "--pretrain-tokens", "1T"), ("--csv", "--json"), ("--plot", "x.pdf"), ("--runtime", "mine"),
        ("--plot", "no/such/folder/x.png"), ("--mla", "both"), ("--encoder-tokens", "5"),
    ],
)  # fmt: skip
def test_bad_usage(config: Path, options: tuple[str, ...]) -> None:
    fails(2, "estimate", config, *options)


def test_no_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("[]", encoding="utf-8")
    assert str(path) in fails(2, "estimate", path)
    fails(2, "estimate", tmp_path / "other.json")


def test_csv_has_the_numbers_of_json(config: Path) -> None:
    lines = list(csv.DictReader(io.StringIO(invoke("estimate", config, "--csv", "--gpu", "h100").stdout)))
    rows = answer(config, "--gpu", "h100")["rows"]
    assert [int(line["cache_bytes"]) for line in lines] == [row["cache_bytes"] for row in rows]
    assert [float(line["decode_seconds_bound"]) for line in lines] == [row["decode"]["seconds"] for row in rows]


def test_what_people_see(config: Path) -> None:
    text = invoke("estimate", config, "--gpu", "h100", "--context", "4k").stdout
    assert "2.00 GiB" in text
    assert "█" in text
    assert " GB" not in text


def test_charts(config: Path, tmp_path: Path) -> None:
    for name in ("a.png", "a.svg", "a.html", "b.svg"):
        assert invoke("estimate", config, "--gpu", "h100", "--plot", tmp_path / name).exit_code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    drawing = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert ET.fromstring(drawing).tag.endswith("svg")
    assert "2.00 GiB" in drawing
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "<svg" in page
    assert "<script" not in page
    assert 'src="' not in page


def test_no_torch(config: Path) -> None:
    program = (
        "import sys; from gqaconvert.cli.app import app\n"
        f"try: app(['estimate', {str(config)!r}, '--gpu', 'h100', '--json'])\n"
        "except SystemExit as end: assert not end.code\n"
        "sys.exit(3 if {'torch', 'transformers', 'matplotlib'} & set(sys.modules) else 0)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
    assert process("estimate", config, "--quiet-nonsense").returncode == 2
