"""Both backends, by the same tests: real loops, real processes, real signals."""

import resource
import shutil
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, T5Config, T5ForConditionalGeneration

from gqaconvert.errors import CheckFailedError, InputError
from gqaconvert.uptrain.checkpoints import checkpoints, is_complete, last_complete, step_of
from gqaconvert.uptrain.data import open_tokens
from gqaconvert.uptrain.hf_trainer import CHECKPOINTS as HF_CHECKPOINTS
from gqaconvert.uptrain.hf_trainer import TransformersTrainer
from gqaconvert.uptrain.job import Job, Loss, Trainable
from gqaconvert.uptrain.models import load_teacher, prepare_model
from gqaconvert.uptrain.torch_loop import CHECKPOINTS as TORCH_CHECKPOINTS
from gqaconvert.uptrain.trainers import check_job, load_trainer, run_job
from tests.uptrain.jobs import (
    SEQ_LEN,
    VOCABULARY,
    ended,
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

NAMES = ["torch", "transformers"]
FILES = {
    "torch": {".metadata", "__0_0.distcp"},
    "transformers": {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"},
}


@pytest.fixture(scope="module", params=NAMES)
def trainer(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def kept(job: Job) -> Path:
    """Where a job's checkpoints are."""
    return job.folder / {"torch": TORCH_CHECKPOINTS, "transformers": HF_CHECKPOINTS}[job.trainer]


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
def whole(trainer: str, place: Path, model: Path, tokens: Path) -> Job:
    """A run that nothing disturbed."""
    job = make_job(place, model, tokens, f"whole-{trainer}", trainer=trainer)
    outcome = run(job)
    assert outcome.finished
    assert outcome.eval_before is not None
    assert outcome.eval_after is not None
    assert outcome.eval_after < outcome.eval_before - 0.1
    return job


def again(whole: Job, name: str, **changes: Any) -> Job:  # noqa: ANN401
    """The same job in a folder of its own."""
    job = replace(whole, run=f"{whole.run}-{name}", **changes)
    job.folder.mkdir()
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
def test_killed_and_resumed_is_bit_identical(after: int, whole: Job) -> None:
    job = again(whole, f"killed-{after}")
    assert interrupt(job, after) == -signal.SIGKILL
    assert len(losses(job)) == after
    resumed_from = last_complete(kept(job))
    assert (resumed_from.name if resumed_from else None) == {2: None, 5: "checkpoint-3"}[after]
    assert run(job).finished
    assert records(job) == records(whole)
    assert same_weights(job, whole)


def test_killed_while_a_checkpoint_is_written(whole: Job) -> None:
    """Whatever the kill leaves of the checkpoint, the run goes on from the last one that is whole."""
    job = again(whole, "killed-in-save")
    process = in_process(run_until, job, 99, signal.SIGKILL)
    half = kept(job) / "checkpoint-6"
    while not half.exists():
        assert process.is_alive()
    process.kill()
    process.join()
    # And one that is half written for certain, with a higher number: the Trainer's own choice.
    broken = kept(job) / "checkpoint-7"
    shutil.copytree(kept(job) / "checkpoint-3", broken)
    (broken / min(FILES[whole.trainer])).write_bytes(b"half")
    assert not is_complete(broken)
    assert run(job).finished
    assert not broken.exists()
    assert records(job) == records(whole)
    assert same_weights(job, whole)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint(number: int, whole: Job) -> None:
    job = again(whole, f"signal-{number}")
    assert interrupt(job, 4, number) == 130
    # The step that the signal comes in is the fourth; the Trainer tells of a step after it has asked whether to stop.
    assert [step_of(path) for path in checkpoints(kept(job))] == [3, {"torch": 4, "transformers": 5}[job.trainer]]
    assert not job.trained.exists()
    assert run(job).finished
    assert records(job) == records(whole)
    assert same_weights(job, whole)


def test_out_of_time_is_not_finished(whole: Job) -> None:
    job = again(whole, "time", max_seconds=0.0)
    outcome = run(job)
    assert (outcome.finished, outcome.steps, outcome.eval_after) == (False, 1, None)
    assert run(replace(job, max_seconds=None)).finished
    assert same_weights(job, whole)


def test_a_finished_run_is_not_repeated(whole: Job) -> None:
    before = records(whole)
    assert run(whole).eval_after == before[-1]["eval_loss"]
    assert records(whole) == before


def test_two_processes_give_the_same_losses(whole: Job) -> None:
    job = again(whole, "two", nproc=2, micro_batch=2, keep=9)
    told: list[Mapping[str, Any]] = []
    assert run_job(job, told.append).finished
    assert losses(job) == pytest.approx(losses(whole), abs=2e-6)
    assert [record["step"] for record in told if "loss" in record] == list(range(1, 9))
    noted: list[str] = getattr(load_trainer(whole.trainer), "notes", lambda job: [])(job)
    assert [note for note in noted if "nothing is sharded" in note] == noted
    assert bool(noted) == (whole.trainer == "transformers")

    alone = again(whole, "two-then-one")
    shutil.copytree(kept(job) / "checkpoint-3", kept(alone) / "checkpoint-3")
    assert run(alone).finished
    assert losses(alone) == pytest.approx(losses(whole)[3:], abs=2e-6)


def test_a_checkpoint_counts_when_all_its_files_are_there(whole: Job, tmp_path: Path) -> None:
    source = checkpoints(kept(whole))[-1]
    assert is_complete(source)
    names = [path.name for path in source.iterdir()]
    assert FILES[whole.trainer] <= set(names)
    for name in names:
        copy = shutil.copytree(source, tmp_path / name)
        if name == "config.json":
            (copy / name).write_bytes((copy / name).read_bytes()[:-1])
        else:
            (copy / name).unlink()
        assert not is_complete(copy), name


@pytest.mark.parametrize("loss", ["distill", "mixed"])
def test_distillation(loss: Loss, trainer: str, place: Path, model: Path, tokens: Path) -> None:
    teacher = place / "teacher"
    if not teacher.exists():
        tiny_llama(teacher, seed=1)
    job = make_job(place, model, tokens, f"{loss}-{trainer}", trainer=trainer, loss=loss, teacher=str(teacher), steps=3)
    run(job)
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
    trainable: Trainable, leaves: str, trainer: str, place: Path, model: Path, tokens: Path
) -> None:
    job = make_job(
        place,
        model,
        tokens,
        f"{trainable}-{trainer}",
        trainer=trainer,
        trainable=trainable,
        steps=2,
        weight_decay=0.1,
        loss="distill",
        teacher=str(model),
    )
    run(job)
    before, after = stock(model).state_dict(), weights(job)
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert changed == {f"model.layers.{layer}.self_attn.{leaf}_proj.weight" for layer in range(2) for leaf in leaves}
    assert records(job)[1]["kl"] == pytest.approx(0, abs=1e-7)  # its own teacher; weights that are shared stay its own


def test_an_encoder_decoder_learns(trainer: str, place: Path) -> None:
    folder = place / f"t5-{trainer}"
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
        place,
        folder,
        token_folder(folder, place, seed=5),
        f"t5-run-{trainer}",
        trainer=trainer,
        steps=4,
        micro_batch=2,
        learning_rate=1e-2,
    )
    outcome = run(job)
    rows = open_tokens(Path(job.tokens), seq_len=SEQ_LEN).split(4)[0].batch(0, 0, 8).input_ids
    reference = T5ForConditionalGeneration.from_pretrained(folder)
    reference.config.decoder_start_token_id = (
        0  # T5 begins with its padding: Raffel et al.'s code, and config.json on the Hub
    )
    with torch.no_grad():
        loss = reference(input_ids=rows[:, :8], labels=rows[:, 8:].contiguous()).loss
    assert outcome.first_loss == pytest.approx(float(loss), abs=1e-5)
    assert losses(job)[3] < losses(job)[0]


def test_two_killed_processes_resume_bit_identical(place: Path, tokens: Path) -> None:
    """Sharded by FSDP2, with tied embeddings, and micro-batches that are accumulated."""
    folder = tiny_llama(place / "tied", kv_heads=2, tied=True)
    one = make_job(place, folder, tokens, "tied", steps=5, micro_batch=2, checkpoint_every=2)
    assert run(one).finished
    job = again(one, "two", nproc=2)
    assert run(job).finished
    assert losses(job) == pytest.approx(losses(one), abs=2e-6)
    killed = again(job, "killed")
    assert interrupt(killed, 3) == -signal.SIGKILL
    assert run(killed).finished
    assert records(killed) == records(job)
    assert same_weights(killed, job)
    for each in (one, job):
        assert weights(each).keys() == load_file(folder / "model.safetensors").keys()


def test_a_checkpoint_of_one_process_goes_on_in_two(place: Path, model: Path, tokens: Path) -> None:
    job = make_job(place, model, tokens, "one-then-two-whole")
    assert run(job).finished
    changed = again(job, "changed")
    assert interrupt(changed, 4, signal.SIGTERM) == 130
    assert run(replace(changed, nproc=2)).finished
    assert losses(changed) == pytest.approx(losses(job), abs=2e-6)


def test_recomputed_activations_and_bfloat16_train_alike(place: Path, model: Path, tokens: Path) -> None:
    plain = make_job(place, model, tokens, "plain", steps=3)
    run(plain)
    recomputed = again(plain, "recomputed", checkpoint_activations=True)
    run(recomputed)
    assert losses(recomputed) == pytest.approx(losses(plain), abs=1e-6)
    for name, count in (("bf16", 1), ("bf16-two", 2)):
        job = again(plain, name, precision="bfloat16", nproc=count)
        run(job)
        assert losses(job) == pytest.approx(losses(plain), abs=0.02)
        assert losses(job) != losses(plain)
        assert {tensor.dtype for tensor in weights(job).values()} == {torch.float32}


def test_frozen_weights_are_held_once(place: Path, model: Path, tokens: Path) -> None:
    """Of a teacher, and in a checkpoint."""
    job = make_job(place, model, tokens, "shared", trainable="kv", loss="distill", teacher=str(model))
    student, names = prepare_model(job)
    teacher = load_teacher(job, student, share=True)
    own = dict(student.named_parameters())
    shared = {name for name, tensor in teacher.named_parameters() if tensor.data_ptr() == own[name].data_ptr()}
    assert shared == own.keys() - set(names)
    assert run(replace(job, steps=2)).finished
    whole = again(job, "all", trainable="all", steps=2)
    assert run(whole).finished
    sizes = [sum(path.stat().st_size for path in kept(one).rglob("*.distcp")) for one in (job, whole)]
    assert sizes[0] < sizes[1] / 3


def test_a_full_disk_leaves_the_last_checkpoint(trainer: str, place: Path, model: Path, tokens: Path) -> None:
    job = make_job(place, model, tokens, f"full-{trainer}", trainer=trainer, steps=5, checkpoint_every=2)
    assert ended(in_process(limited_run, job, 3)) == 103  # the exit code 3: environment
    assert [step_of(path) for path in checkpoints(kept(job)) if is_complete(path)] == [2]
    assert not job.trained.exists()
    assert run(job).finished
    whole = again(job, "whole")
    assert run(whole).finished
    assert same_weights(job, whole)


def limited_run(job: Job, step: int) -> None:
    """In a forked process: from a step on, no file can grow."""

    def on_event(record: Mapping[str, Any]) -> None:
        if record["step"] == step:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            size = job.metrics.stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 2000, size + 2000))

    run_until(job, 99, signal.SIGKILL, on_event)


def test_faults_are_named(trainer: str, place: Path, model: Path, tokens: Path) -> None:
    def problems(**changes: Any) -> str:  # noqa: ANN401
        job = make_job(place, model, tokens, "faults", trainer=trainer, **changes)
        return " | ".join(check_job(load_trainer(trainer), job))

    assert problems() == ""
    assert "no multiple of 3 processes" in problems(nproc=3, micro_batch=1)
    assert "fsdpp" in problems(backend_options={"fsdpp": 1})
    assert "does not know --loss 'rl'" in problems(loss="rl")
    if trainer == "torch":
        assert "no tracker 'mlflow'" in problems(report_to=("mlflow",))
        assert "the package trackio is not installed" in problems(report_to=("trackio",))

    with pytest.raises(InputError, match="fsdpp"):
        run(make_job(place, model, tokens, "faults", trainer=trainer, backend_options={"fsdpp": 1}))
    with pytest.raises(InputError, match="needs the unconverted model"):
        run(make_job(place, model, tokens, "faults", trainer=trainer, loss="distill"))
    other = tiny_llama(place / f"wide-{trainer}")
    wide = stock(other)
    wide.resize_token_embeddings(VOCABULARY + 1)
    wide.save_pretrained(other)
    with pytest.raises(InputError, match="no teacher for"):
        run(make_job(place, model, tokens, "faults", trainer=trainer, loss="mixed", teacher=str(other)))
    job = make_job(place, model, tokens, f"nan-{trainer}", trainer=trainer, learning_rate=1e30)
    with pytest.raises(CheckFailedError, match=r"step [23]: the loss is (nan|inf)"):
        run(job)


def test_options_of_the_trainer_are_checked(place: Path, model: Path, tokens: Path) -> None:
    def problems(**options: Any) -> str:  # noqa: ANN401
        job = make_job(place, model, tokens, "faults", backend_options=options)
        return " | ".join(TransformersTrainer().check(job))

    assert "decided by the job" in problems(learning_rate=1)
    assert "no such file: /none.json" in problems(accelerate_config="/none.json")
    assert "deepspeed is not installed" in problems(deepspeed={})
    sharded = make_job(place, model, tokens, "faults", backend_options={"fsdp": "full_shard"})
    assert "not FSDP" in " ".join(TransformersTrainer().notes(sharded))
    assert "no multiple of 1 processes x 3" in " ".join(
        TransformersTrainer().check(make_job(place, model, tokens, "faults", micro_batch=3))
    )
