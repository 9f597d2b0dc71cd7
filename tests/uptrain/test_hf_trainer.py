"""The ``transformers`` backend: real Trainer, real processes, real signals."""

import json
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from gqaconvert.errors import CheckFailedError, InputError
from gqaconvert.uptrain.data import open_tokens
from gqaconvert.uptrain.hf_trainer import CHECKPOINTS, TransformersTrainer, checkpoints, is_complete, last_complete
from gqaconvert.uptrain.job import Job, Loss, Trainable
from tests.uptrain.jobs import (
    SEQ_LEN,
    VOCABULARY,
    in_process,
    interrupt,
    losses,
    make_job,
    records,
    run,
    run_until,
    same_weights,
    tiny_llama,
    token_folder,
    weights,
)  # fmt: skip

NAME = "transformers"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uptrain")


@pytest.fixture(scope="module")
def model(place: Path) -> Path:
    return tiny_llama(place / "model", kv_heads=2)


@pytest.fixture(scope="module")
def tokens(place: Path, model: Path) -> Path:
    return token_folder(model, place)


@pytest.fixture(scope="module")
def whole(place: Path, model: Path, tokens: Path) -> Job:
    """A run that nothing disturbed."""
    job = make_job(place, model, tokens, "whole")
    outcome = run(NAME, job)
    assert outcome.finished
    assert outcome.eval_before is not None
    assert outcome.eval_after is not None
    assert outcome.eval_after < outcome.eval_before - 0.1
    return job


def stock(folder: Path) -> Any:  # noqa: ANN401
    auto: Any = AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32)


def test_a_run_is_the_plain_loop_over_the_data(whole: Job, model: Path, tokens: Path) -> None:
    """The losses of a loop written by hand, with the stock class's own loss on whole batches."""
    data, held_out = open_tokens(tokens, seq_len=SEQ_LEN).split(4)
    plain = stock(model).train()
    matrices = [p for p in plain.parameters() if p.ndim == 2]
    vectors = [p for p in plain.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], weight_decay=0.0, betas=(0.9, 0.95))
    found = records(whole)
    steps = [record for record in found if "loss" in record]
    # One step of warm-up, then the plateau; from the fifth on the last four fall to zero at the ninth, which is none.
    rates = [3e-3, 3e-3, 3e-3, 3e-3, 3e-3, 3e-3 * 3 / 4, 3e-3 * 2 / 4, 3e-3 / 4]
    assert [record["lr"] for record in steps] == pytest.approx(rates)
    for number, record in enumerate(steps):
        rows = data.batch(0, number, 8).input_ids
        loss = plain(input_ids=rows, labels=rows).loss
        assert record["loss"] == record["lm"] == pytest.approx(loss.item(), abs=2e-6)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert record["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        for group in optimizer.param_groups:
            group["lr"] = rates[number]
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        rows = torch.cat([batch.input_ids for batch in held_out.ordered(4)])
        after = float(plain.eval()(input_ids=rows, labels=rows).loss)
    assert found[-1] == {"step": 8, "eval_loss": pytest.approx(after, abs=2e-6)}
    assert stock(whole.trained).config.num_key_value_heads == 2


@pytest.mark.parametrize("after", [2, 5])
def test_killed_and_resumed_is_bit_identical(after: int, whole: Job, place: Path) -> None:
    job = make_job(place, Path(whole.model), Path(whole.tokens), f"killed-{after}")
    assert interrupt(NAME, job, after) == -signal.SIGKILL
    assert len(losses(job)) == after
    resumed_from = last_complete(job.folder / CHECKPOINTS)
    assert (resumed_from.name if resumed_from else None) == {2: None, 5: "checkpoint-3"}[after]
    assert run(NAME, job).finished
    assert records(job) == records(whole)
    assert same_weights(job, whole)


def test_killed_while_a_checkpoint_is_written(whole: Job, place: Path) -> None:
    """Whatever the kill leaves of the checkpoint, the run goes on from the last one that is whole."""
    job = make_job(place, Path(whole.model), Path(whole.tokens), "killed-in-save")
    process = in_process(run_until, NAME, job, 99, signal.SIGKILL)
    half = job.folder / CHECKPOINTS / "checkpoint-6"
    while not half.exists():
        assert process.is_alive()
    process.kill()
    process.join()
    # And one that is half written for certain, with a higher number: the Trainer's own choice.
    broken = job.folder / CHECKPOINTS / "checkpoint-7"
    shutil.copytree(job.folder / CHECKPOINTS / "checkpoint-3", broken)
    (broken / "optimizer.pt").write_bytes(b"half")
    assert not is_complete(broken)
    assert run(NAME, job).finished
    assert not broken.exists()
    assert records(job) == records(whole)
    assert same_weights(job, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint(number: int, whole: Job, place: Path) -> None:
    job = make_job(place, Path(whole.model), Path(whole.tokens), f"signal-{number}")
    assert interrupt(NAME, job, 4, number) == 130
    assert [path.name for path in checkpoints(job.folder / CHECKPOINTS)] == ["checkpoint-3", "checkpoint-5"]
    assert not job.trained.exists()
    assert run(NAME, job).finished
    assert records(job) == records(whole)
    assert same_weights(job, whole)


def test_out_of_time_is_not_finished(whole: Job, place: Path) -> None:
    job = make_job(place, Path(whole.model), Path(whole.tokens), "time", max_seconds=0.0)
    outcome = run(NAME, job)
    assert (outcome.finished, outcome.steps, outcome.eval_after) == (False, 1, None)
    assert run(NAME, replace(job, max_seconds=None)).finished
    assert same_weights(job, whole)


def test_a_finished_run_is_not_repeated(whole: Job) -> None:
    before = records(whole)
    assert run(NAME, whole).eval_after == before[-1]["eval_loss"]
    assert records(whole) == before


def test_two_processes_give_the_same_losses(whole: Job, place: Path) -> None:
    job = make_job(place, Path(whole.model), Path(whole.tokens), "two", nproc=2, micro_batch=2, keep=9)
    told: list[Mapping[str, Any]] = []
    trainer = TransformersTrainer()
    assert trainer.run(job, told.append).finished
    assert losses(job) == pytest.approx(losses(whole), abs=2e-6)
    assert [record["step"] for record in told if "loss" in record] == list(range(1, 9))
    assert any("nothing is sharded" in note for note in trainer.notes(job))

    alone = make_job(place, Path(whole.model), Path(whole.tokens), "two-then-one")
    shutil.copytree(job.folder / CHECKPOINTS / "checkpoint-3", alone.folder / CHECKPOINTS / "checkpoint-3")
    assert run(NAME, alone).finished
    assert losses(alone) == pytest.approx(losses(whole)[3:], abs=2e-6)


def test_a_checkpoint_counts_when_all_its_files_are_there(whole: Job, tmp_path: Path) -> None:
    source = checkpoints(whole.folder / CHECKPOINTS)[-1]
    assert is_complete(source)
    names = [path.name for path in source.iterdir()]
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= set(names)
    for name in names:
        copy = shutil.copytree(source, tmp_path / name)
        if name == "config.json":
            (copy / name).write_bytes((copy / name).read_bytes()[:-1])
        else:
            (copy / name).unlink()
        assert not is_complete(copy), name


@pytest.mark.parametrize("loss", ["distill", "mixed"])
def test_distillation(loss: Loss, place: Path, model: Path, tokens: Path) -> None:
    teacher = place / "teacher"
    if not teacher.exists():
        tiny_llama(teacher, seed=1)
    job = make_job(place, model, tokens, loss, loss=loss, teacher=str(teacher), steps=3)
    run(NAME, job)
    first = records(job)[1]
    rows = open_tokens(tokens, seq_len=SEQ_LEN).split(4)[0].batch(0, 0, 8).input_ids
    with torch.no_grad():
        logits = stock(model)(input_ids=rows).logits[:, :-1].double().log_softmax(-1)
        wanted = stock(teacher)(input_ids=rows).logits[:, :-1].double().log_softmax(-1)
    kl = float((wanted.exp() * (wanted - logits)).sum(-1).mean())
    lm = -float(logits.gather(-1, rows[:, 1:, None]).mean())
    assert first["kl"] == pytest.approx(kl, abs=1e-5)
    assert first["lm"] == pytest.approx(lm, abs=1e-5)
    assert first["loss"] == pytest.approx(kl if loss == "distill" else (kl + lm) / 2, abs=1e-5)
    assert records(job)[3]["kl"] < first["kl"]


@pytest.mark.parametrize(("trainable", "leaves"), [("kv", "kv"), ("attention", "qkvo")])
def test_only_what_was_asked_for_is_trained(
    trainable: Trainable, leaves: str, place: Path, model: Path, tokens: Path
) -> None:
    job = make_job(
        place,
        model,
        tokens,
        trainable,
        trainable=trainable,
        steps=2,
        weight_decay=0.1,
        loss="distill",
        teacher=str(model),
    )
    run(NAME, job)
    before, after = stock(model).state_dict(), weights(job)
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {f"model.layers.{layer}.self_attn.{leaf}_proj.weight" for layer in range(2) for leaf in leaves}
    assert records(job)[1]["kl"] == pytest.approx(0, abs=1e-7)  # its own teacher; weights that are shared stay its own


def test_an_encoder_decoder_learns(place: Path) -> None:
    folder = place / "t5"
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=1,
        num_heads=4,
        dropout_rate=0.0,
    )
    T5ForConditionalGeneration(config).save_pretrained(folder)
    job = make_job(
        place, folder, token_folder(folder, place, seed=5), "t5-run", steps=4, micro_batch=2, learning_rate=1e-2
    )
    outcome = run(NAME, job)
    rows = open_tokens(Path(job.tokens), seq_len=SEQ_LEN).split(4)[0].batch(0, 0, 8).input_ids
    reference = T5ForConditionalGeneration.from_pretrained(folder)
    reference.config.decoder_start_token_id = (
        0  # T5 begins with its padding: Raffel et al.'s code, and config.json on the Hub
    )
    with torch.no_grad():
        loss = reference(input_ids=rows[:, :8], labels=rows[:, 8:].contiguous()).loss
    assert outcome.first_loss == pytest.approx(float(loss), abs=1e-5)
    assert losses(job)[3] < losses(job)[0]


def test_faults_are_named(place: Path, model: Path, tokens: Path) -> None:
    def problems(**changes: Any) -> str:  # noqa: ANN401
        return " | ".join(TransformersTrainer().check(make_job(place, model, tokens, "faults", **changes)))

    assert problems() == ""
    assert "no multiple of 1 processes x 3" in problems(micro_batch=3)
    assert "no field 'fsdpp'" in problems(backend_options={"fsdpp": 1})
    assert "decided by the job" in problems(backend_options={"learning_rate": 1})
    assert "no such file: /none.json" in problems(backend_options={"accelerate_config": "/none.json"})
    assert "deepspeed is not installed" in problems(backend_options={"deepspeed": {}})
    sharded = make_job(place, model, tokens, "faults", backend_options={"fsdp": "full_shard"})
    assert "not FSDP" in " ".join(TransformersTrainer().notes(sharded))

    with pytest.raises(InputError, match="no field"):
        run(NAME, make_job(place, model, tokens, "faults", backend_options={"fsdpp": 1}))
    with pytest.raises(InputError, match="needs the unconverted model"):
        run(NAME, make_job(place, model, tokens, "faults", loss="distill"))
    other = tiny_llama(place / "wide")
    config = json.loads((other / "config.json").read_text())
    wide = stock(other)
    wide.resize_token_embeddings(VOCABULARY + 1)
    wide.save_pretrained(other)
    assert config["vocab_size"] == VOCABULARY
    with pytest.raises(InputError, match="no teacher for"):
        run(NAME, make_job(place, model, tokens, "faults", loss="mixed", teacher=str(other)))
    job = make_job(place, model, tokens, "nan", learning_rate=1e30)
    with pytest.raises(CheckFailedError, match=r"step [23]: the loss is (nan|inf)"):
        run(NAME, job)
