"""Budgets and costs against published figures, closed forms, torch's own counter of operations, and autograd."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gqaconvert.checkpoint.source import open_source
from gqaconvert.errors import InputError
from gqaconvert.inspection import read_checkpoint, read_provenance
from gqaconvert.kvcache.costs import GPUS
from gqaconvert.uptrain.budget import Budget, ModelShape, costs, known_base, resolve, shape_of, training_flops
from tests.support.runs import convert

EXAMPLES = Path(__file__).parents[2] / "examples"
LLAMA_2_7B = ModelShape(
    parameters=6_738_415_616, active=6_738_415_616 - 32_000 * 4096, attention=2_147_483_648, kv=1_073_741_824,
    layers=32, width=4096, hidden=4096, inner=11_008, vocabulary=32_000,
)  # fmt: skip


@given(st.integers(1, 10**15), st.integers(1, 10**8))
def test_tokens_are_rounded_up_to_whole_steps(tokens: int, per_step: int) -> None:
    budget = resolve(tokens=tokens, tokens_per_step=per_step)
    assert budget.tokens == budget.steps * per_step
    assert 0 <= budget.tokens - tokens < per_step


def test_five_percent_of_llama_2() -> None:
    base = known_base("meta-llama/Llama-2-7b-hf")
    assert base is not None
    budget = resolve(alpha=0.05, base=base, tokens_per_step=2**22)
    assert budget.tokens == pytest.approx(100e9, rel=1e-4)
    assert budget.alpha == pytest.approx(0.05, rel=1e-4)
    assert budget.source == base.source
    given_by_user = resolve(alpha=0.05, pretrain_tokens=10**9, base=base, tokens_per_step=1000)
    assert (given_by_user.steps, given_by_user.source) == (50_000, None)
    assert resolve(steps=10, tokens_per_step=7) == Budget(10, 70)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "exactly once"),
        ({"steps": 1, "tokens": 1}, "--steps and --tokens"),
        ({"steps": 0}, "not positive"),
        ({"alpha": -0.1, "pretrain_tokens": 10}, "not positive"),
        ({"alpha": 5.0, "pretrain_tokens": 10}, "is a part"),
        ({"alpha": 0.05}, "no config.json"),
        ({"alpha": 0.05, "pretrain_tokens": 0}, "not positive"),
    ],
)
def test_other_budgets_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve(tokens_per_step=10, **options)
    assert words in caught.value.message


def test_a_conversion_knows_its_base(tmp_path: Path) -> None:
    # The example's own script: 1500 steps of 8 rows of 256 tokens.
    once = convert(EXAMPLES / "tiny-llama", tmp_path / "once", "--kv-heads", 4)
    twice = convert(once, tmp_path / "twice", "--kv-heads", 2)
    for folder in (EXAMPLES / "tiny-llama", once, twice):
        base = known_base(str(folder), read_provenance(open_source(str(folder))))
        assert base is not None
        assert base.tokens == 3_072_000
    assert known_base("some/model") is None
    assert known_base("some/model", {"source": None}) is None


def test_palm_reaches_the_published_utilisation() -> None:
    # Chowdhery et al. 2022, appendix B and section 4.1: 540.35 B parameters, 118 layers, 48 heads of 256, 2048 tokens;
    # 238.3 thousand tokens a second on 6144 chips of 275 teraFLOP/s are 46.2 %.
    n = 540_350_000_000
    palm = ModelShape(n, n, 0, 0, layers=118, width=48 * 256, hidden=18432, inner=4 * 18432, vocabulary=256_000)
    assert training_flops(palm, 2048) * 238_300 / (6144 * 275e12) == pytest.approx(0.462, abs=0.0005)


def shape_on_disk(model: Any, folder: Path) -> ModelShape:  # noqa: ANN401
    model.save_pretrained(folder)
    return shape_of(read_checkpoint(open_source(str(folder))))


SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "attn_implementation": "eager",
}  # fmt: skip


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("trainable", ["all", "attention", "kv"])
def test_operations_agree_with_those_that_torch_counts(tied: bool, trainable: str, tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    shape = shape_on_disk(model, tmp_path)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    wanted = {"all": "", "attention": "_proj", "kv": "_proj"}[trainable]
    trained = 0
    for name, parameter in model.named_parameters():
        leaf = name.rpartition(".weight")[0].rpartition(".")[2]
        chosen = trainable == "all" or (
            ("self_attn" in name) and (trainable == "attention" or leaf in ("k_proj", "v_proj"))
        )
        parameter.requires_grad_(chosen and wanted in leaf)
        trained += parameter.numel() if parameter.requires_grad else 0
    assert trained == shape.trained(trainable)
    tokens = torch.randint(512, (2, 128))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    # Norms are parameters but no products; the first layers need no gradient of their inputs.
    assert training_flops(shape, 128, trainable=trainable) == pytest.approx(
        counter.get_total_flops() / tokens.numel(), rel=0.02 if trainable == "all" else 0.12
    )


def test_experts_that_rest_are_not_counted(tmp_path: Path) -> None:
    config = MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=1)
    shape = shape_on_disk(MixtralForCausalLM(config), tmp_path)
    expert = 3 * 128 * 352
    table = 512 * 128
    assert shape.parameters - shape.active == 3 * 3 * expert + table


@pytest.mark.parametrize("family", [LlamaForCausalLM, Qwen3ForCausalLM])
@pytest.mark.parametrize(
    "changes", [{}, {"num_key_value_heads": 8}, {"hidden_size": 64, "head_dim": 32}, {"intermediate_size": 1024}]
)
def test_activations_are_roughly_what_autograd_keeps(
    family: type[PreTrainedModel], changes: dict[str, Any], tmp_path: Path
) -> None:
    config_class = LlamaConfig if family is LlamaForCausalLM else Qwen3Config
    kept: list[int] = []
    model: Any = None
    for layers in (1, 2):
        model = family(
            config_class(
                **SIZES | {"head_dim": 16, "attn_implementation": "sdpa"} | changes | {"num_hidden_layers": layers}
            )
        )
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        storages: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, found: dict[int, torch.Tensor] = storages) -> torch.Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            tokens = torch.randint(512, (2, 64))
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        kept.append(sum(t.untyped_storage().nbytes() for place, t in storages.items() if place not in weights))
        del loss
    shape = replace(shape_on_disk(model, tmp_path), layers=1)
    estimated = costs(shape, Budget(1, 128), seq_len=64, micro_batch=2).activations
    assert 0.7 < (kept[1] - kept[0]) / estimated < 1.15


def test_memory_and_time_of_llama_2() -> None:
    budget = resolve(tokens=10**9, tokens_per_step=2**19)
    full = costs(
        LLAMA_2_7B, budget, seq_len=4096, micro_batch=1, bf16=True, activation_checkpointing=True, gpu=GPUS["h100"]
    )
    # Weight, gradient and the two moments of Adam (Kingma and Ba 2015, algorithm 1), each in float32.
    assert full.weights + full.gradients + full.optimizer == 16 * 6_738_415_616
    plain = replace(full)
    assert full.memory == sum(
        (plain.weights, plain.gradients, plain.optimizer, plain.teacher, plain.activations, plain.logits)
    )
    kv = costs(
        LLAMA_2_7B,
        budget,
        seq_len=4096,
        micro_batch=1,
        bf16=True,
        trainable="kv",
        teacher=LLAMA_2_7B,
        optimizer="adamw8bit",
    )
    assert kv.optimizer == 2 * 1_073_741_824
    assert kv.teacher == 2 * 1_073_741_824
    assert (
        costs(LLAMA_2_7B, budget, seq_len=4096, micro_batch=1, bf16=True, teacher=LLAMA_2_7B).teacher
        == 2 * 6_738_415_616
    )
    sharded = costs(LLAMA_2_7B, budget, seq_len=4096, micro_batch=1, devices=8, gpu=GPUS["h100"])
    assert sharded.weights * 8 == full.weights
    # Recomputation costs one forward pass more: 8 N + 16 L H Q T instead of 6 N + 12 L H Q T.
    assert full.flops * 3 == pytest.approx(sharded.flops * 4, rel=1e-6)
    assert full.seconds == pytest.approx(full.flops / (989e12 * 0.4))
    assert sharded.seconds == pytest.approx(sharded.flops / (989e12 * 0.4 * 8))
    assert costs(LLAMA_2_7B, budget, seq_len=4096, micro_batch=1).seconds is None
    assert full.to_json()["memory"] == full.memory
