"""``gqaconvert uptrain`` and ``gqaconvert trainers``."""

import json as json_module
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gqaconvert.cli.options import Json, Offline, Quiet, Revision, count, duration
from gqaconvert.cli.output import new_console, note, print_json, safe
from gqaconvert.errors import InputError
from gqaconvert.uptrain import DEFAULT_LEARNING_RATE

if TYPE_CHECKING:
    from gqaconvert.uptraining import UptrainPlan, UptrainResult


def uptrain_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A converted checkpoint's folder, or a Hub id.", show_default=False)
    ],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder to create.", show_default=False)],
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            show_default=False,
            help="Text, .jsonl, .parquet, a folder, a glob, hub:NAME[:CONFIG[:SPLIT]], .npy, .bin; repeatable.",
        ),
    ],
    steps: Annotated[int | None, typer.Option("--steps", help="Steps of the optimiser.", show_default=False)] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", parser=count, metavar="N", help="E.g. 100M or 2B, instead.", show_default=False),
    ] = None,
    alpha: Annotated[
        float | None, typer.Option("--alpha", help="Part of the pre-training, instead: 0.05.", show_default=False)
    ] = None,
    pretrain_tokens: Annotated[
        int | None,
        typer.Option(
            "--pretrain-tokens",
            parser=count,
            metavar="N",
            help="What --alpha is a part of, e.g. 2T.",
            show_default="known for well-known bases",
        ),
    ] = None,
    max_time: Annotated[
        float | None,
        typer.Option(
            "--max-time", parser=duration, metavar="TIME", help="Stop with a checkpoint: 90m, 8h.", show_default=False
        ),
    ] = None,
    loss: Annotated[str, typer.Option("--loss", help="lm, distill (KL against the teacher), mixed.")] = "lm",
    teacher: Annotated[
        str | None,
        typer.Option("--teacher", metavar="DIR", help="The unconverted model.", show_default="the recorded source"),
    ] = None,
    trainable: Annotated[str, typer.Option("--trainable", help="all, attention or kv.")] = "all",
    lr: Annotated[
        float, typer.Option("--lr", help="Peak learning rate; tiny models take more.")
    ] = DEFAULT_LEARNING_RATE,
    warmup: Annotated[float, typer.Option("--warmup", help="Part of the steps in which it rises.")] = 0.05,
    decay: Annotated[float, typer.Option("--decay", help="Part of the steps in which it falls to zero.")] = 0.5,
    weight_decay: Annotated[float, typer.Option("--weight-decay", help="Of AdamW, on matrices.")] = 0.0,
    clip: Annotated[float, typer.Option("--clip", help="Largest norm of the gradient.")] = 1.0,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Sequences a step, over all processes.")] = 8,
    micro_batch: Annotated[
        int | None,
        typer.Option("--micro-batch", help="Sequences at once in a process.", show_default="at most 4"),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", help="Tokens a sequence.", show_default="the context, at most 1024")
    ] = None,
    packing: Annotated[
        str, typer.Option("--packing", help="concat, or document: attention stops where a document ends.")
    ] = "concat",
    field: Annotated[str, typer.Option("--field", help="Of JSON lines, parquet and data sets.")] = "text",
    eval_data: Annotated[
        str | None, typer.Option("--eval-data", metavar="FILE", help="Held-out text.", show_default="the data's end")
    ] = None,
    eval_windows: Annotated[int, typer.Option("--eval-windows", help="Sequences of it; 0: none.")] = 16,
    eval_every: Annotated[
        int | None, typer.Option("--eval-every", help="Steps.", show_default="a fifth of the run")
    ] = None,
    precision: Annotated[str, typer.Option("--precision", help="float32 or bfloat16 (mixed).")] = "float32",
    checkpoint_activations: Annotated[
        bool, typer.Option("--checkpoint-activations", help="Recompute activations: slower, less memory.")
    ] = False,
    optimizer: Annotated[str, typer.Option("--optimizer", help="adamw or adamw8bit (bitsandbytes).")] = "adamw",
    seed: Annotated[int, typer.Option("--seed", help="Of the order of the data.")] = 0,
    checkpoint_every: Annotated[
        int | None, typer.Option("--checkpoint-every", help="Steps.", show_default="a tenth of the run")
    ] = None,
    keep: Annotated[int, typer.Option("--keep", help="Checkpoints that stay.")] = 2,
    trainer: Annotated[str, typer.Option("--trainer", help="A backend: see 'gqaconvert trainers'.")] = "torch",
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Processes (sharded by FSDP2).")] = 1,
    threads: Annotated[int, typer.Option("--threads", help="Of torch in each; 0: its own choice.")] = 0,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", metavar="KEY=VALUE", help="For the backend; JSON values.", show_default=False),
    ] = None,
    report_to: Annotated[
        list[str] | None,
        typer.Option("--report-to", help="tensorboard, wandb, trackio; repeatable.", show_default=False),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", metavar="NAME", help="Estimate hours for it: h100, ...", show_default=False)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print budget and costs, and write nothing.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard an unfinished run.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model in DIR, once the new one is whole.")
    ] = False,
    revision: Revision = None,
    offline: Offline = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Train a converted checkpoint for a short while. The same command goes on where it was interrupted."""
    from gqaconvert.uptrain.processes import is_main
    from gqaconvert.uptraining import UptrainOptions, plan_uptraining, uptrain

    if not is_main():  # torchrun started several of us; one speaks for all
        json, quiet = False, True
    options = UptrainOptions(
        steps=steps, tokens=tokens, alpha=alpha, pretrain_tokens=pretrain_tokens, trainer=trainer,
        loss=_one_of("--loss", loss, "lm", "distill", "mixed"), teacher=teacher,
        trainable=_one_of("--trainable", trainable, "all", "attention", "kv"), learning_rate=lr, warmup=warmup,
        decay=decay, weight_decay=weight_decay, clip=clip, batch_size=batch_size, micro_batch=micro_batch,
        seq_len=seq_len, packing=_one_of("--packing", packing, "concat", "document"), text_field=field,
        eval_data=eval_data, eval_windows=eval_windows, eval_every=eval_every,
        precision=_one_of("--precision", precision, "float32", "bfloat16"),
        checkpoint_activations=checkpoint_activations,
        optimizer=_one_of("--optimizer", optimizer, "adamw", "adamw8bit"), seed=seed,
        checkpoint_every=checkpoint_every, keep=keep, max_seconds=max_time, nproc=nproc, threads=threads,
        report_to=tuple(report_to or ()), backend_options=dict(_pair(text) for text in option or ()), gpu=gpu,
    )  # fmt: skip
    if dry_run:
        plan = plan_uptraining(model, out, tuple(data), options, revision=revision, offline=offline)
        print_json(plan.to_json()) if json else _show_plan(plan)
        return
    with _Progress(show=not (json or quiet)) as progress:
        result = uptrain(
            model, out, tuple(data), options, revision=revision, offline=offline, restart=restart, overwrite=overwrite,
            on_plan=progress.plan, on_tokens=progress.tokens, on_data=progress.data, on_event=progress.event,
        )  # fmt: skip
    if json:
        print_json(result.to_json())
    elif not quiet:
        _show_result(result)


def trainers_command(json: Json = False) -> None:
    """List the trainer backends that are installed; other packages add theirs (group gqaconvert.trainers)."""
    from dataclasses import asdict

    from gqaconvert.uptrain.trainers import list_trainers

    found = list_trainers()
    if json:
        print_json({"schema": "gqaconvert.trainers/1", "trainers": [asdict(info) for info in found]})
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for column in ("trainer", "package", "losses", "trains", "nproc", "exact resume", "seq2seq"):
        table.add_column(column, overflow="fold", no_wrap=column in ("trainer", "package"))
    for info in found:
        if (can := info.capabilities) is None:
            table.add_row(safe(info.name), safe(info.package), f"[red]broken:[/] {safe(info.fault or '')}")
            continue
        flags = (can.processes, can.exact_resume, can.encoder_decoder)
        table.add_row(
            safe(info.name), safe(info.package), ", ".join(can.losses), ", ".join(can.trainable),
            "any" if flags[0] else "1", *("yes" if flag else "no" for flag in flags[1:]),
        )  # fmt: skip
    new_console().print(table)


def _one_of(name: str, value: str, *known: str) -> Any:  # noqa: ANN401
    if value not in known:
        raise InputError(f"{name} {value}: no such choice", hint=f"known: {', '.join(known)}")
    return value


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise InputError(f"--option {text}: write KEY=VALUE")
    try:
        return name, json_module.loads(value)
    except ValueError:
        return name, value


def _show_plan(plan: "UptrainPlan") -> None:
    from rich.table import Table

    from gqaconvert.units import format_size

    job, budget, costs = plan.job, plan.budget, plan.costs
    length = f"{budget.steps:,} steps of {job.batch_size} x {job.seq_len:,} tokens: {budget.tokens:,} tokens"
    if budget.alpha is not None:
        length += f", {budget.alpha:.3g} of the pre-training"
        length += f" ({budget.source})" if budget.source else ""
    parts = {
        "weights": costs.weights, "gradients": costs.gradients, "optimiser": costs.optimizer, "teacher": costs.teacher,
        "activations": costs.activations, "logits": costs.logits,
    }  # fmt: skip
    memory = ", ".join(f"{name} {format_size(size)}" for name, size in parts.items() if size)
    rate = f"{job.learning_rate:g} at its peak, rising over {job.warmup:.0%}, falling to zero over the last"
    rows = {
        "model": plan.checkpoint.files.label,
        "destination": f"{plan.destination} (nothing is written: --dry-run)",
        "data": ", ".join(plan.data),
        "trainer": f"{job.trainer}, {job.nproc} process{'es' if job.nproc > 1 else ''}, {job.precision}",
        "budget": length,
        "loss": job.loss + (f", teacher {plan.teacher}" if plan.teacher else ""),
        "trained": job.trainable,
        "learning rate": f"{rate} {job.decay:.0%}",
        "operations": f"{costs.flops:.3g} ({costs.model_flops_per_token:.3g} a token)",
        "memory": f"{format_size(costs.memory)} a device, roughly: {memory}",
    }
    if costs.seconds is not None:
        rows["time"] = f"{costs.seconds / 3600:,.2f} h at {costs.utilisation:.0%} of its peak"
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, safe(value))
    new_console().print(grid)
    for text in plan.notes:
        note(f"note: {text}")


def _show_result(result: "UptrainResult") -> None:
    from math import exp

    outcome, plan = result.outcome, result.plan
    figures = [
        f"{name} {exp(loss):.2f}"
        for name, loss in (
            ("before", outcome.eval_before), ("after", outcome.eval_after), ("unconverted", result.source_loss),
        )
        if loss is not None
    ]  # fmt: skip
    if outcome.spikes:
        note(f"note: the loss spiked at {len(outcome.spikes)} steps, first at {outcome.spikes[0]}")
    told = f"; held-out perplexity {', '.join(figures)}" if figures else ""
    if outcome.finished:
        note(f"{plan.destination}: {outcome.steps:,} steps{told}")
    else:
        note(f"stopped after {outcome.steps:,} of {plan.job.steps:,} steps: the same command goes on{told}")


class _Progress:
    """What people see while it runs: a live line on a terminal, a few plain ones elsewhere."""

    def __init__(self, *, show: bool) -> None:
        self._show = show
        self._live: Any = None
        self._task: Any = None
        self._steps = 1

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def plan(self, plan: "UptrainPlan") -> None:
        """Before anything is done."""
        self._steps = plan.job.steps
        if not self._show:
            return
        for text in plan.notes:
            note(f"note: {text}")
        if sys.stderr.isatty():
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._live = Progress(
                TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(),
                TextColumn("{task.fields[told]}"), TimeRemainingColumn(), console=new_console(stderr=True),
            )  # fmt: skip
            self._task = self._live.add_task("tokenising", total=None, told="")
            self._live.start()

    def tokens(self, number: int) -> None:
        """So many more."""
        if self._live is not None:
            self._live.advance(self._task, number)

    def data(self, plan: "UptrainPlan") -> None:
        """The text is tokens."""
        if self._live is not None:
            self._live.remove_task(self._task)
            self._task = self._live.add_task("training", total=self._steps, told="loading")
        if self._show:
            for text in plan.notes[-1:] if plan.notes and "every token" in plan.notes[-1] else ():
                note(f"note: {text}")

    def event(self, record: Mapping[str, Any]) -> None:
        """A record of the metrics."""
        step = record["step"]
        if "eval_loss" in record:
            text = f"step {step}: held-out loss {record['eval_loss']:.4f}"
            if self._live is not None:
                self._live.console.print(text, highlight=False)
            elif self._show:
                note(text)
            return
        if record.get("spike") and self._show:
            note(f"step {step}: the loss spiked to {record['loss']:.3f}")
        told = f"loss {record['loss']:.4f}  lr {record['lr']:.2e}  {record['tokens_per_second']:,.0f} tokens/s"
        if self._live is not None:
            self._live.update(self._task, completed=step, told=told)
        elif self._show and (step % max(1, self._steps // 10) == 0 or step == 1):
            note(f"step {step} of {self._steps}: {told}")
