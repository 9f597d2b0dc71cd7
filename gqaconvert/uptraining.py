"""Uptraining: continue the training of a converted checkpoint for a short while, by a backend of the user's choice.

    model, data, budget -> plan (a Job, costs, what to know) -> tokens -> backend -> weights in float32 -> a folder

Between its runs everything is in a working folder beside the destination; the same command goes on from there. The
destination appears by one rename.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gqaconvert import __version__
from gqaconvert.card import front_matter, source_card
from gqaconvert.checkpoint.files import LocalFolder
from gqaconvert.checkpoint.index import read_index
from gqaconvert.checkpoint.source import fetch_source, open_source
from gqaconvert.checkpoint.staging import Staging
from gqaconvert.checkpoint.writer import hash_file
from gqaconvert.destination import check_destination, json_bytes, located, refuse_overlap, storage_errors
from gqaconvert.errors import DestinationError, GqaConvertError, InputError, MissingExtraError
from gqaconvert.families.config import CONTEXT
from gqaconvert.inspection import Checkpoint, read_checkpoint, read_provenance
from gqaconvert.kvcache.costs import GPUS
from gqaconvert.sidecars import CARD, CONFIG, PROVENANCE, SOURCE_CARD, output_name, plan_sidecars
from gqaconvert.uptrain import DEFAULT_LEARNING_RATE
from gqaconvert.uptrain.budget import Budget, Costs, costs, known_base, resolve, shape_of
from gqaconvert.uptrain.job import Job, Loss, OnEvent, Outcome, Precision, Trainable
from gqaconvert.uptrain.trainers import check_job, load_trainer, run_job

SCHEMA = "gqaconvert.uptrain/1"
PROVENANCE_SCHEMA = "gqaconvert.uptrain-provenance/1"
METRICS, CURVE = "uptraining/metrics.jsonl", "uptraining/loss.png"
REQUEST = "request.json"
_FREE = frozenset((
    "run", "tokens", "eval_tokens", "micro_batch", "checkpoint_every", "keep", "max_seconds", "nproc", "threads",
    "report_to", "flops_per_token", "checkpoint_activations",
))  # fmt: skip
"""Fields of a job that a continued run may change: they say where and how it runs, not what comes out."""


@dataclass(frozen=True)
class UptrainOptions:
    """How to uptrain. Exactly one of ``steps``, ``tokens`` and ``alpha`` is given.

    Attributes:
        steps: optimiser steps.
        tokens: tokens in all.
        alpha: part of the pre-training (Ainslie et al., EMNLP 2023, section 2.2: 0.05).
        pretrain_tokens: of the pre-training, where it is not known.
        trainer: name of the backend.
        loss: "lm", "distill" or "mixed".
        teacher: the unconverted model; by default what gqaconvert.json records.
        trainable: "all", "attention" or "kv".
        learning_rate: peak.
        warmup: part of the steps.
        decay: part of the steps, at the end.
        weight_decay: of AdamW.
        clip: largest norm of the gradient.
        batch_size: sequences a step.
        micro_batch: sequences at once in a process; by default as many as divide the batch, at most 4.
        seq_len: tokens a sequence; by default 1,024 or the model's context, if that is shorter.
        packing: "concat" or "document".
        text_field: of JSON lines, parquet and data sets.
        eval_data: text to evaluate on; by default the end of the data is kept for it.
        eval_windows: sequences of it.
        eval_every: steps between evaluations; by default a fifth of the run.
        precision: "float32" or "bfloat16".
        checkpoint_activations: recompute activations.
        optimizer: "adamw" or "adamw8bit".
        seed: of the order of the data.
        checkpoint_every: steps; by default a tenth of the run.
        keep: checkpoints that stay.
        max_seconds: stop then, with a checkpoint.
        nproc: processes.
        threads: of torch in each.
        report_to: trackers.
        backend_options: the backend's own.
        gpu: name, to estimate hours by.
    """

    steps: int | None = None
    tokens: int | None = None
    alpha: float | None = None
    pretrain_tokens: int | None = None
    trainer: str = "torch"
    loss: Loss = "lm"
    teacher: str | None = None
    trainable: Trainable = "all"
    learning_rate: float = DEFAULT_LEARNING_RATE
    warmup: float = 0.05
    decay: float = 0.5
    weight_decay: float = 0.0
    clip: float = 1.0
    batch_size: int = 8
    micro_batch: int | None = None
    seq_len: int | None = None
    packing: str = "concat"
    text_field: str = "text"
    eval_data: str | None = None
    eval_windows: int = 16
    eval_every: int | None = None
    precision: Precision = "float32"
    checkpoint_activations: bool = False
    optimizer: str = "adamw"
    seed: int = 0
    checkpoint_every: int | None = None
    keep: int = 2
    max_seconds: float | None = None
    nproc: int = 1
    threads: int = 0
    report_to: tuple[str, ...] = ()
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    gpu: str | None = None


@dataclass(frozen=True)
class UptrainPlan:
    """What a run would do.

    Attributes:
        checkpoint: the model that is trained.
        destination: folder to create.
        data: sources of text, as the user wrote them.
        options: as given.
        job: what the backend is told; its tokens are not made yet.
        budget: how long.
        costs: what it takes.
        teacher: the unconverted model, as it is called.
        notes: what the user should know.
    """

    checkpoint: Checkpoint
    destination: Path
    data: tuple[str, ...]
    options: UptrainOptions
    job: Job
    budget: Budget
    costs: Costs
    teacher: str | None
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            "schema": SCHEMA,
            "dry_run": True,
            "model": self.checkpoint.files.label,
            "revision": self.checkpoint.files.revision,
            "destination": str(self.destination),
            "data": list(self.data),
            "teacher": self.teacher,
            "budget": asdict(self.budget),
            "costs": self.costs.to_json(),
            "job": asdict(self.job),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class UptrainResult:
    """A run that ended.

    Attributes:
        plan: what was to be done.
        outcome: how it ended; without a finished one there is no destination yet.
        shards: name -> sha256 of the destination's.
        source_loss: held-out loss of the unconverted model in nats a token, where there was a teacher.
    """

    plan: UptrainPlan
    outcome: Outcome
    shards: Mapping[str, str]
    source_loss: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            **self.plan.to_json(),
            "dry_run": False,
            "outcome": asdict(self.outcome),
            "source_loss": self.source_loss,
            "shards": dict(self.shards),
        }


def plan_uptraining(
    model: str,
    destination: str | Path,
    data: tuple[str, ...],
    options: UptrainOptions,
    *,
    revision: str | None = None,
    offline: bool = False,
    fetch: bool = False,
) -> UptrainPlan:
    """What a run would do; nothing is written, and of a Hub id only headers travel, unless ``fetch``.

    Raises:
        GqaConvertError: whatever forbids the run.
    """
    if find_spec("transformers") is None:
        raise MissingExtraError("transformers", "transformers")
    target = located(destination)
    if not data:
        raise InputError("no data to train on", hint="--data FILE, a folder, a glob, or hub:NAME")
    _require_sense(options)
    opener = fetch_source if fetch else open_source
    checkpoint = read_checkpoint(opener(model, revision=revision, offline=offline))
    checkpoint.require_sound()
    config, record = checkpoint.config, read_provenance(checkpoint.files)
    teacher, teacher_label = None, None
    if options.loss != "lm":
        teacher_label, teacher = _teacher(options.teacher, record, opener, offline=offline)
    elif options.teacher is not None:
        raise InputError("--teacher belongs to --loss distill and mixed")
    length = options.seq_len or min(1024, config.count(CONTEXT) or 1024)
    budget = resolve(
        tokens_per_step=options.batch_size * length, steps=options.steps, tokens=options.tokens, alpha=options.alpha,
        pretrain_tokens=options.pretrain_tokens, base=known_base(checkpoint.files.label, record),
    )  # fmt: skip
    micro = options.micro_batch or _micro_batch(options)
    taught = shape_of(teacher) if teacher else None
    spent = costs(
        shape_of(checkpoint), budget, seq_len=length, micro_batch=micro, trainable=options.trainable, teacher=taught,
        bf16=options.precision == "bfloat16", activation_checkpointing=options.checkpoint_activations,
        optimizer=options.optimizer, devices=options.nproc, gpu=GPUS[options.gpu] if options.gpu else None,
    )  # fmt: skip
    run = target.parent / f".{target.name}.uptrain"
    job = Job(
        trainer=options.trainer, model=_root(checkpoint), run=str(run), tokens="", eval_tokens=None,
        eval_windows=options.eval_windows, seq_len=length, teacher=_root(teacher) if teacher else None,
        steps=budget.steps, batch_size=options.batch_size, micro_batch=micro, learning_rate=options.learning_rate,
        packing=options.packing, warmup=options.warmup, decay=options.decay, weight_decay=options.weight_decay,
        clip=options.clip, loss=options.loss, trainable=options.trainable, precision=options.precision,
        checkpoint_activations=options.checkpoint_activations, optimizer=options.optimizer, seed=options.seed,
        checkpoint_every=options.checkpoint_every or max(1, budget.steps // 10), keep=options.keep,
        eval_every=max(1, budget.steps // 5) if options.eval_every is None else options.eval_every,
        max_seconds=options.max_seconds, nproc=options.nproc, threads=options.threads,
        flops_per_token=spent.model_flops_per_token, report_to=options.report_to,
        backend_options=options.backend_options,
    )  # fmt: skip
    trainer = load_trainer(options.trainer)
    if faults := check_job(trainer, job):
        raise InputError("; ".join(faults))
    notes = list(getattr(trainer, "notes", lambda job: [])(job))
    if not trainer.capabilities().exact_resume:
        notes.append(f"the trainer {trainer.name} does not promise that a continued run ends with the same weights")
    if record is None:
        notes.append("the model has no gqaconvert.json: it is trained as it is")
    return UptrainPlan(checkpoint, target, data, options, job, budget, spent, teacher_label, tuple(notes))


def uptrain(
    model: str,
    destination: str | Path,
    data: tuple[str, ...],
    options: UptrainOptions,
    *,
    revision: str | None = None,
    offline: bool = False,
    restart: bool = False,
    overwrite: bool = False,
    on_plan: Callable[[UptrainPlan], None] = lambda plan: None,
    on_tokens: Callable[[int], None] = lambda tokens: None,
    on_data: Callable[[UptrainPlan], None] = lambda plan: None,
    on_event: OnEvent = lambda record: None,
) -> UptrainResult:
    """Train, and write the result to a new folder; goes on where an earlier run of the same command stopped.

    Args:
        model: folder or Hub id of the (converted) checkpoint.
        destination: folder to create.
        data: what to train on, see `gqaconvert.uptrain.sources`.
        options: how.
        revision: branch, tag or commit of a Hub id.
        offline: use only what is in the Hub client's cache.
        restart: discard an unfinished run.
        overwrite: replace a destination that is not empty, once the new one is whole.
        on_plan: called once, before anything is written.
        on_tokens: called with the number of tokens that were just made of the text.
        on_data: called once the text is tokens, with what is now known of it.
        on_event: called with each record of metrics.jsonl.

    Raises:
        GqaConvertError: nothing was written to the destination.
        KeyboardInterrupt: after a checkpoint.
    """
    from gqaconvert.uptrain.processes import is_main, together

    plan = plan_uptraining(model, destination, data, options, revision=revision, offline=offline, fetch=True)
    folder = plan.checkpoint.files
    assert isinstance(folder, LocalFolder)
    refuse_overlap(folder, plan.checkpoint.index, plan.destination)
    if is_main():
        on_plan(plan)
        if (done := _finished_earlier(plan)) is not None:
            return done
        check_destination(plan.destination, overwrite=overwrite)
    hint = "what was done is kept; after mending the cause, the same command goes on"
    with storage_errors(plan.destination, hint):
        if is_main():
            _begin(plan, restart=restart)
        with together():
            plan = _with_tokens(plan, on_tokens)
        if is_main():
            on_data(plan)
        outcome = run_job(plan.job, on_event)
        if not outcome.finished or not is_main():
            return UptrainResult(plan, outcome, {})
        return _finish(plan, folder, outcome)


def _require_sense(options: UptrainOptions) -> None:
    if options.gpu is not None and options.gpu not in GPUS:
        raise InputError(f"no GPU {options.gpu!r}", hint=f"known: {', '.join(GPUS)}")
    for name in ("batch_size", "nproc", "keep"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} {getattr(options, name)} is not positive")
    if not options.learning_rate > 0:
        raise InputError(f"--lr {options.learning_rate:g} is not positive")
    if not (options.warmup >= 0 and options.decay >= 0 and options.warmup + options.decay <= 1):
        raise InputError("--warmup and --decay are parts of the run, together at most 1")
    if options.seq_len is not None and options.seq_len < 2:
        raise InputError(f"--seq-len {options.seq_len}: a sequence has at least two tokens")


def _micro_batch(options: UptrainOptions) -> int:
    each = max(1, options.batch_size // options.nproc)
    return next(size for size in (4, 3, 2, 1) if each % size == 0)


def _root(checkpoint: Checkpoint) -> str:
    files = checkpoint.files
    return str(files.root.resolve()) if isinstance(files, LocalFolder) else files.label


def _teacher(
    given: str | None, record: Mapping[str, Any] | None, opener: Callable[..., Any], *, offline: bool
) -> tuple[str, Checkpoint]:
    """(name, checkpoint) of the unconverted model: the given one, or the one at the root of the records.

    Raises:
        GqaConvertError: there is none, it is gone, or it is not the one that is recorded.
    """
    if given is not None:
        return given, read_checkpoint(opener(given, offline=offline))
    origin = None
    while isinstance(record, Mapping) and isinstance(record.get("source"), Mapping):
        origin = record["source"]
        record = origin.get("provenance")
    if origin is None or not isinstance(origin.get("id"), str):
        raise InputError(
            "the model does not record what it was converted from", hint="--teacher DIR: the unconverted model"
        )
    name = origin["id"]
    try:
        found = read_checkpoint(opener(name, revision=origin.get("revision"), offline=offline))
    except GqaConvertError as error:
        raise InputError(
            f"the recorded source {name} cannot be opened: {error.message}", hint="--teacher DIR: the unconverted model"
        ) from None
    if found.index.total_size != origin.get("total_size"):
        raise InputError(
            f"{name} is not the model that was converted: {found.index.total_size:,} bytes of weights, the record says "
            f"{origin.get('total_size')}",
            hint="--teacher DIR: the unconverted model",
        )
    return name, found


def _begin(plan: UptrainPlan, *, restart: bool) -> None:
    """Make the working folder, or see that the one that is there belongs to the same run.

    Raises:
        DestinationError: it belongs to another.
    """
    folder = plan.job.folder
    request = _request(plan)
    path = folder / REQUEST
    if restart:
        shutil.rmtree(folder, ignore_errors=True)
    if path.exists():
        try:
            earlier = json.loads(path.read_text())
        except ValueError:
            earlier = {}
        changed = [name for name in request if request[name] != earlier.get(name)]
        if changed:
            told = "; ".join(
                f"{name}: {_short(earlier.get(name))}, now {_short(request[name])}" for name in changed[:4]
            )
            raise DestinationError(
                f"an unfinished run to {plan.destination} was started otherwise ({told})",
                hint="give the same command again to continue it, or --restart to discard it",
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    path.write_bytes(json_bytes(request))


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _request(plan: UptrainPlan) -> dict[str, Any]:
    """All that decides the weights, as JSON gives it back."""
    job = {name: value for name, value in asdict(plan.job).items() if name not in _FREE}
    stamps = {name: _stamps(Path(job[name])) for name in ("model", "teacher") if job[name]}
    extra = {
        "data": list(plan.data), "field": plan.options.text_field, "eval_data": plan.options.eval_data, "files": stamps,
        "version": __version__,
    }  # fmt: skip
    document: dict[str, Any] = json.loads(json.dumps({**job, **extra}))
    return document


def _stamps(folder: Path) -> dict[str, list[int]]:
    files = LocalFolder.open(folder)
    return {name: list(files.stamp(name)) for name in files.sizes if name.endswith(".safetensors") or name == CONFIG}


def _with_tokens(plan: UptrainPlan, advance: Callable[[int], None]) -> UptrainPlan:
    """The plan with its text as tokens; all processes find those that the first has made.

    Raises:
        GqaConvertError: the text cannot be read, or is too little.
    """
    from gqaconvert.uptrain.data import open_parts, prepare, usable

    job, options = plan.job, plan.options
    cache = job.folder / "tokens"
    settings: dict[str, Any] = {
        "seq_len": job.seq_len, "packing": job.packing, "field": options.text_field, "advance": advance
    }  # fmt: skip
    tokens = prepare(plan.data, Path(job.model), cache, **settings)
    windows, held_out = job.eval_windows, None
    if options.eval_data is not None:
        held_out = str(prepare((options.eval_data,), Path(job.model), cache, **settings).folder)
    elif windows:
        windows = min(windows, tokens.count // 10)
    job = replace(job, tokens=str(tokens.folder), eval_tokens=held_out, eval_windows=windows)
    data, _ = open_parts(
        tokens.folder, Path(held_out) if held_out else None, windows, seq_len=job.seq_len, packing=job.packing
    )
    word = usable(data, plan.budget.tokens)
    return replace(plan, job=job, notes=(*plan.notes, *([word] if word else [])))


def _finished_earlier(plan: UptrainPlan) -> UptrainResult | None:
    """The result of the same run, if it was completed and killed only afterwards, or is asked for again."""
    try:
        record = json.loads((plan.destination / PROVENANCE).read_text())
        if record["recipe"]["request"] != _request(plan):
            return None
        shards = {name: shard["sha256"] for name, shard in record["shards"].items()}
        outcome = Outcome(**{**record["outcome"], "spikes": tuple(record["outcome"]["spikes"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if any(hash_file(plan.destination / name) != digest for name, digest in shards.items()):
        return None
    shutil.rmtree(plan.job.folder, ignore_errors=True)
    return UptrainResult(plan, outcome, shards, record["outcome_of_source"])


def _finish(plan: UptrainPlan, folder: LocalFolder, outcome: Outcome) -> UptrainResult:
    """Write the destination from the trained weights, and drop the working folder."""
    from gqaconvert.uptrain.weights import write_weights

    job = plan.job
    source_loss = _source_loss(job)
    with Staging(plan.destination) as staging:
        staging.begin(json.dumps(_request(plan)), resume=False)
        trained = read_index(LocalFolder.open(job.trained))
        shards = write_weights(plan.checkpoint.index, trained, staging.model, lambda nbytes: None)
        sidecars = plan_sidecars(plan.checkpoint.index)
        for name in sidecars.names:
            target = staging.model / output_name(name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder.path(name), target)
        if plan.checkpoint.index.index_file:
            shutil.copyfile(
                folder.path(plan.checkpoint.index.index_file), staging.model / plan.checkpoint.index.index_file
            )
        (staging.model / METRICS).parent.mkdir(exist_ok=True)
        shutil.copyfile(job.metrics, staging.model / METRICS)
        drawn = _draw(plan, staging.model / CURVE, source_loss)
        result = UptrainResult(plan, outcome, shards, source_loss)
        card = uptraining_card(result, source_card(folder), picture=drawn)
        (staging.model / CARD).write_bytes(card.encode(errors="replace"))
        (staging.model / PROVENANCE).write_bytes(json_bytes(provenance(result)))
        shutil.copyfile(folder.path(CONFIG), staging.model / CONFIG)
        staging.commit()
    shutil.rmtree(job.folder, ignore_errors=True)
    return result


def _source_loss(job: Job) -> float | None:
    """The teacher's loss on the held-out text."""
    if job.teacher is None or not job.eval_windows:
        return None
    import torch

    from gqaconvert.uptrain.data import open_parts
    from gqaconvert.uptrain.loss import evaluate
    from gqaconvert.uptrain.models import load_model

    _, held_out = open_parts(
        Path(job.tokens), Path(job.eval_tokens) if job.eval_tokens else None, job.eval_windows, seq_len=job.seq_len,
        packing=job.packing,
    )  # fmt: skip
    assert held_out is not None
    model = load_model(Path(job.teacher)).to("cuda" if torch.cuda.is_available() else "cpu")
    return evaluate(model, held_out.ordered(job.micro_batch), encoder_decoder=bool(model.config.is_encoder_decoder))


def _draw(plan: UptrainPlan, target: Path, source_loss: float | None) -> bool:
    from gqaconvert.uptrain.curve import write_curve

    try:
        write_curve(plan.job.metrics, target, title=f"Uptraining of {_name(plan)}", source_loss=source_loss)
    except MissingExtraError:
        return False
    return True


def _name(plan: UptrainPlan) -> str:
    files = plan.checkpoint.files
    return getattr(files, "repo_id", None) or files.label.rstrip("/").rpartition("/")[2]


def provenance(result: UptrainResult) -> dict[str, Any]:
    """gqaconvert.json of the trained model: its source is the converted one, whose own record is within."""
    plan = result.plan
    checkpoint = plan.checkpoint
    geometry = checkpoint.sites[0].geometry if checkpoint.sites else None
    return {
        "schema": PROVENANCE_SCHEMA,
        "tool": {"name": "gqaconvert", "version": __version__},
        "source": {
            "id": checkpoint.files.label,
            "revision": checkpoint.files.revision,
            "model_type": checkpoint.config.model_type,
            "family": checkpoint.family.name if checkpoint.family else None,
            "num_attention_heads": geometry.num_attention_heads if geometry else None,
            "num_key_value_heads": geometry.num_key_value_heads if geometry else None,
            "head_dim": geometry.head_dim if geometry else None,
            "total_size": checkpoint.index.total_size,
            "provenance": read_provenance(checkpoint.files),
        },
        "recipe": {
            "command": "uptrain",
            "trainable": plan.job.trainable,
            "teacher": plan.teacher,
            "budget": asdict(plan.budget),
            "request": _request(plan),
        },
        "outcome": asdict(result.outcome),
        "outcome_of_source": result.source_loss,
        "result": {
            "num_key_value_heads": geometry.num_key_value_heads if geometry else None,
            "total_size": checkpoint.index.total_size,
        },
        "shards": {
            shard.shard: {"sha256": result.shards[shard.shard], "nbytes": shard.data_start + shard.data_bytes}
            for shard in checkpoint.index.shards
        },
    }


def uptraining_card(result: UptrainResult, card: str, *, picture: bool) -> str:
    """README.md of the trained model."""
    from math import exp

    from huggingface_hub import ModelCardData

    plan, job, outcome = result.plan, result.plan.job, result.outcome
    kept = ("license", "license_name", "license_link", "language", "library_name", "pipeline_tag", "tags", "base_model")
    fields = {key: value for key, value in front_matter(card).items() if key in kept}
    rows = [("trainer", job.trainer), ("steps", f"{job.steps:,} of {job.batch_size} x {job.seq_len:,} tokens")]
    if plan.budget.alpha is not None:
        rows.append(("part of the pre-training", f"{plan.budget.alpha:.3g}"))
    rows += [
        ("loss", job.loss + (f", teacher `{plan.teacher}`" if plan.teacher else "")), ("trained", job.trainable),
        ("peak learning rate", f"{job.learning_rate:g}"), ("data", ", ".join(f"`{name}`" for name in plan.data)),
    ]  # fmt: skip
    figures = [("before", outcome.eval_before), ("after", outcome.eval_after), ("unconverted", result.source_loss)]
    lines = [
        "---", ModelCardData(**fields).to_yaml(), "---", "", f"# {_name(plan)}, uptrained", "",
        f"Trained by gqaconvert {__version__} from `{plan.checkpoint.files.label}`.", "", "| | |\n|---|---|",
        *(f"| {name} | {value} |" for name, value in rows), "",
    ]  # fmt: skip
    if outcome.eval_after is not None:
        lines += ["| held-out text | loss, nats a token | perplexity |", "|---|---|---|"]
        lines += [f"| {name} | {loss:.4f} | {exp(loss):.2f} |" for name, loss in figures if loss is not None]
        lines.append("")
    if outcome.spikes:
        lines += [f"The loss spiked at steps {', '.join(map(str, outcome.spikes[:20]))}.", ""]
    if picture:
        lines += [f"![loss by step]({CURVE})", ""]
    lines += [f"All figures are in `{METRICS}`, recipe and hashes in `{PROVENANCE}`."]
    if card:
        lines[-1] += f" The original model's own card is `{SOURCE_CARD}`."
    return "\n".join([*lines, ""])
