"""Published sizes, with their source.

The dimensions of the models are written down here, not read from their repositories; where a published figure is
exact, its agreement is what speaks for them.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from gqaconvert.families.config import ModelConfig
from gqaconvert.kvcache.dtypes import cache_dtype
from gqaconvert.kvcache.layers import CacheSettings, cache_size
from gqaconvert.kvcache.models import cache_model
from gqaconvert.policies.spec import KVPolicy

KIB, MIB, GIB = 2**10, 2**20, 2**30


def decoder(layers: int, kv_heads: int, head_dim: int, heads: int = 64, kind: str = "llama", **more: Any) -> Any:  # noqa: ANN401
    return {
        "model_type": kind, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "hidden_size": heads * head_dim, **more,
    }  # fmt: skip


LLAMA3_8B = decoder(32, 8, 128, 32)
LLAMA3_70B = decoder(80, 8, 128)
LLAMA31_405B = decoder(126, 8, 128, 128)
LLAMA2_7B = decoder(32, 32, 128, 32)
YI_34B = decoder(60, 8, 128, 56)
YI_6B = decoder(32, 4, 128, 32)
QWEN25_32B = decoder(64, 8, 128, 40, "qwen2", use_sliding_window=False, max_window_layers=64, sliding_window=131072)
COMMAND_R = decoder(40, 64, 128, 64, "cohere")
QWEN3_235B = decoder(94, 4, 128, 64, "qwen3_moe", use_sliding_window=False, sliding_window=None)
MINIMAX_M2 = decoder(62, 8, 128, 48, "minimax_m2")
PHI35_MINI = decoder(32, 32, 96, 32, "phi3", sliding_window=262144)
QWEN25_1B = decoder(28, 2, 128, 12, "qwen2", use_sliding_window=False)
QWEN25_7B = decoder(28, 4, 128, 28, "qwen2", use_sliding_window=False)
GPT2_XL = {"model_type": "gpt2", "n_layer": 48, "n_head": 25, "n_embd": 1600, "n_positions": 1024}
OPT_13B = {"model_type": "opt", "num_hidden_layers": 40, "num_attention_heads": 40, "hidden_size": 5120}
MIXTRAL = decoder(32, 8, 128, 32, "mixtral", sliding_window=None)
QWEN35_27B = decoder(
    64, 4, 256, 24, "qwen3_5_text", full_attention_interval=4, linear_num_key_heads=16, linear_num_value_heads=48,
    linear_key_head_dim=128, linear_value_head_dim=128, linear_conv_kernel_dim=4,
)  # fmt: skip
GPT_OSS_120B = decoder(36, 8, 64, 64, "gpt_oss", sliding_window=128)
GEMMA2_27B = decoder(46, 16, 128, 32, "gemma2", sliding_window=4096)
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "kv_lora_rank": 512,
    "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
WHISPER_V3 = {
    "model_type": "whisper", "decoder_layers": 32, "decoder_attention_heads": 20, "d_model": 1280,
    "max_source_positions": 1500, "max_target_positions": 448,
}  # fmt: skip


def total(config: Mapping[str, Any], tokens: int, dtype: str = "float16", **settings: Any) -> int:  # noqa: ANN401
    kind = cache_dtype(dtype)
    return cache_size(cache_model(ModelConfig.of(config)), tokens, 1, CacheSettings(kind, kind, **settings)).total


# Each row: what was published, as bytes; the tolerance is the rounding of the printed figure.
PUBLISHED = [
    ("llama.cpp #7119", LLAMA3_8B, 2048, "float16", 256 * MIB, 0),
    ("HF dranger003/c4ai-command-r-v01 discussion 6", LLAMA3_70B, 2048, "float16", 640 * MIB, 0),
    ("same, Yi-1.5-34B", YI_34B, 2048, "float16", 480 * MIB, 0),
    ("same, Command-R", COMMAND_R, 2048, "float16", 2560 * MIB, 0),
    ("HF TheBloke/Yi-34B-200K discussion 1", YI_34B, 50_000, "float16", int(11718.75 * MIB), 0),
    ("same, Yi-6B", YI_6B, 200_000, "float16", 12500 * MIB, 0),
    ("llama.cpp #11200", QWEN25_32B, 32_768, "q8_0", 4352 * MIB, 0),
    ("llama.cpp #11446", DEEPSEEK_V3, 32_768, "float16", 2196 * MIB, 0),
    ("DeepSeek-V3 hardware paper, 70.272 KB a token", DEEPSEEK_V3, 1, "bfloat16", 70_272, 0),
    ("same, Llama-3.1-405B, 516 KB a token", LLAMA31_405B, 1, "bfloat16", 516_096, 0),
    ("huggingface/blog #2345, 1k", LLAMA3_8B, 1024, "float16", GIB // 8, 0),
    ("huggingface/blog #2345, 16k is 16000", LLAMA3_8B, 16_000, "float16", int(1.95 * GIB), 0.005 * GIB),
    ("huggingface/blog #2345, 70B", LLAMA3_70B, 16_000, "float16", int(4.88 * GIB), 0.005 * GIB),
    ("vllm #10517", LLAMA3_8B, 1952 * 16, "bfloat16", int(3.8125 * GIB), 0),
    ("vllm-project/tpu-inference #223", LLAMA3_8B, 131_072, "bfloat16", 16 * GIB, 0),
    ("hf-mem README", MINIMAX_M2, 196_608, "fp8", 24_964_497_408, 0),
    ("torchedup.dev, 1.07 GB", LLAMA2_7B, 2048, "float16", 1_070_000_000, 5_000_000),
    ("KIVI #17, 2.05 GiB", LLAMA2_7B, 4196, "float16", int(2.05 * GIB), 0.005 * GIB),
    ("Jamba paper, Mixtral at 256K", MIXTRAL, 262_144, "bfloat16", 32 * GIB, 0),
    ("Jamba paper, Llama-2-7B at 256K", LLAMA2_7B, 262_144, "bfloat16", 128 * GIB, 0),
    ("llm-resource-planner", PHI35_MINI, 4096, "float16", 3 * GIB // 2, 0),
    ("unsloth #9525, 4096", QWEN35_27B, 4096, "float16", int(0.40 * GIB), 0.005 * GIB),
    ("unsloth #9525, 262144", QWEN35_27B, 262_144, "float16", int(16.15 * GIB), 0.005 * GIB),
    ("paiml/realizar #187", QWEN25_1B, 4096, "float32", 224 * MIB, 0),
    ("GPT-2 XL, 300 KiB a token", GPT2_XL, 1, "float16", 300 * KIB, 0),
    ("PagedAttention paper, OPT-13B, 800 KB a token", OPT_13B, 1, "float16", 800 * KIB, 0),
]


@pytest.mark.parametrize(("source", "config", "tokens", "dtype", "published", "rounding"), PUBLISHED,
                         ids=[row[0] for row in PUBLISHED])  # fmt: skip
def test_published(
    source: str, config: Mapping[str, Any], tokens: int, dtype: str, published: int, rounding: float
) -> None:
    assert abs(total(config, tokens, dtype) - published) <= rounding


WRONG = [
    ("Yi-34B-200K discussion: MiB divided by 1000", YI_34B, 200_000, "float16", int(46.875 * GIB), 45.776),
    ("huggingface/blog #2345: 405B with 16 KV heads", LLAMA31_405B, 1024, "float16", int(0.984 * GIB), 0.4922),
    ("vllm #22291: Qwen2.5-7B with bits as bytes", QWEN25_7B, 1, "bfloat16", 1_530_000, 56 / 1024**2),
    ("Hacker News: Gemma-2-27B, head_dim 144, no windows", GEMMA2_27B, 1_000_000, "fp8", 200 * 10**9, None),
]


@pytest.mark.parametrize(
    ("source", "config", "tokens", "dtype", "published", "right"), WRONG, ids=[r[0] for r in WRONG]
)
def test_published_and_wrong(
    source: str, config: Mapping[str, Any], tokens: int, dtype: str, published: int, right: float | None
) -> None:
    found = total(config, tokens, dtype)
    assert abs(found / published - 1) > 0.02
    if right is not None:
        assert found / GIB == pytest.approx(right, rel=1e-3)


def test_gemma2_counts_its_windows() -> None:
    # 23 full layers of 1e6 tokens, 23 of 4096; 16 heads of 128, one byte, K and V.
    assert total(GEMMA2_27B, 1_000_000, "fp8") == 23 * (1_000_000 + 4096) * 16 * 128 * 2


def test_latent_cache_without_the_absorbed_form() -> None:
    # llama.cpp #11446: 4.77 MiB a token, 2.86 of keys and 1.91 of values.
    assert total(DEEPSEEK_V3, 1, expand_latent=True) / MIB == pytest.approx(4.77, abs=0.005)


def test_latent_cache_is_whole_on_every_device() -> None:
    assert total(DEEPSEEK_V3, 1000, tensor_parallel=8) == 8 * total(DEEPSEEK_V3, 1000)


def test_qwen3_235b_on_four_devices() -> None:
    # vllm #21348 (SGLang): 367404 tokens are 8.23 "GB" of keys on each device, and as much of values.
    kind = cache_dtype("bfloat16")
    size = cache_size(cache_model(ModelConfig.of(QWEN3_235B)), 367_404, 1, CacheSettings(kind, kind, tensor_parallel=4))
    assert size.per_device / 2 / GIB == pytest.approx(8.23, abs=0.005)


def test_gpt_oss_saves_by_its_windows() -> None:
    # hf-mem #60: 73728 bytes a token before windows were counted; half the layers keep 128 tokens.
    assert total(GPT_OSS_120B, 100) == 73_728 * 100
    assert total(GPT_OSS_120B, 10_000) == 73_728 // 2 * (10_000 + 128)


def test_replication_beyond_the_kv_heads() -> None:
    # 32 layers, 2 KV heads of 128, 8192 tokens, bfloat16: 0.25 GiB alone, 1 GiB summed over 8 devices.
    config = decoder(32, 2, 128, 32)
    assert (total(config, 8192), total(config, 8192, tensor_parallel=8)) == (GIB // 4, GIB)


def test_whisper_cross_attention() -> None:
    # TensorRT-LLM #19514: the encoder has 1500 positions, not 1024. 2 x 32 x 20 x 64 x 2 bytes a position.
    model = cache_model(ModelConfig.of(WHISPER_V3))
    kind = cache_dtype("float16")
    parts = cache_size(model, 448, 1, CacheSettings(kind, kind, encoder_tokens=model.encoder_tokens or 0)).parts
    assert parts["cross"] == 1500 * 163_840
    assert parts["attention"] == 448 * 163_840


def test_keys_and_values_of_two_types() -> None:
    # unsloth #9525: 10.40 "GB" at 262144 tokens is one of K and V in q4_0, not both.
    model = cache_model(ModelConfig.of(QWEN35_27B))
    settings = CacheSettings(cache_dtype("q4_0"), cache_dtype("float16"))
    assert cache_size(model, 262_144, 1, settings).total / GIB == pytest.approx(10.40, abs=0.005)


def test_scales_of_quantised_caches() -> None:
    # vLLM: 4 bytes for each token, head and side at int8; nvfp4: d/2 + d/16.
    assert total(LLAMA3_8B, 1, "int8") == 32 * 8 * 2 * (128 + 4)
    assert total(LLAMA3_8B, 1, "nvfp4") == 32 * 8 * 2 * (64 + 8)
    assert total(LLAMA3_8B, 1, "q4_0") == 32 * 8 * 2 * 128 * 18 // 32


def test_blocks_round_up() -> None:
    # PyPI kvplan: 4.91 GiB are 40208 tokens in blocks of 16.
    assert total(LLAMA3_8B, 40_193, block=16) == total(LLAMA3_8B, 40_208)
    assert int(4.91 * GIB) // (16 * 128 * KIB) * 16 == 40_208


def test_policies() -> None:
    # TOVA (Table 1), Llama-2-7B at 4096 tokens: 2.147 GB become 0.268; L2 at a half with two of 32 layers spared: .531.
    assert total(LLAMA2_7B, 4096) == 2_147_483_648
    assert total(LLAMA2_7B, 4096, policy=KVPolicy.parse("tova:512")) == 268_435_456
    half = total(LLAMA2_7B, 4096, policy=KVPolicy.parse("l2:0.5"))
    assert half / total(LLAMA2_7B, 4096) == (2 + 0.5 * 30) / 32
    # GQA with 8 of 32 heads and TOVA multiply: 32 times.
    assert total({**LLAMA2_7B, "num_key_value_heads": 8}, 4096, policy=KVPolicy.parse("tova:512")) * 32 == 2**31


def test_prefill_peak_of_a_policy() -> None:
    # 7 layers at budget 12 and one at 96 tokens; one head of 30 float32 each side: 7*12+96 entries of 240 bytes.
    config = decoder(8, 1, 30, 1)
    kind = cache_dtype("float32")
    settings = CacheSettings(kind, kind, policy=KVPolicy.parse("tova:12"))
    size = cache_size(cache_model(ModelConfig.of(config)), 96, 1, settings)
    assert (size.total, size.prefill_peak) == (8 * 12 * 240, (7 * 12 + 96) * 240)
