"""``gqaconvert convert``."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gqaconvert.cli.options import FamilyName, Json, Offline, Quiet, Revision, Source, size
from gqaconvert.cli.output import byte_progress, new_console, note, print_json, safe
from gqaconvert.errors import InputError

if TYPE_CHECKING:
    from gqaconvert.conversion import ConversionResult, RecipeOptions
    from gqaconvert.planning import ConversionPlan


def convert_command(
    source: Source,
    destination: Annotated[str, typer.Argument(metavar="DST", help="Folder to create.", show_default=False)],
    kv_heads: Annotated[
        int | None,
        typer.Option("--kv-heads", metavar="N", help="Number of KV heads of the output.", show_default=False),
    ] = None,
    mqa: Annotated[bool, typer.Option("--mqa", help="One KV head: the same as --kv-heads 1.")] = False,
    method: Annotated[
        str, typer.Option("--method", help="mean (the paper's), subspace (keeps far more), align; first, random.")
    ] = "mean",
    grouping: Annotated[
        str, typer.Option("--grouping", help="subspace, align: adjacent heads, or similar ones (reordered).")
    ] = "adjacent",
    calibrate: Annotated[
        str | None,
        typer.Option(
            "--calibrate",
            metavar="FILE|example",
            help="subspace, align: fit to this text.",
            show_default="weights only",
        ),
    ] = None,
    calibration_tokens: Annotated[
        int, typer.Option("--calibration-tokens", min=1, help="Use at most so many tokens of it.")
    ] = 40_000,
    refine: Annotated[
        str | None,
        typer.Option("--refine", metavar="N|auto", help="Then fit each layer for N steps.", show_default="no steps"),
    ] = None,
    joint: Annotated[
        int | None,
        typer.Option(
            "--joint",
            metavar="N",
            min=0,
            show_default="no steps",
            help="Then N steps on all layers together; needs the whole model in memory.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", metavar="FILE", help="subspace, align: .html or .json, layer by layer.", show_default=False
        ),
    ] = None,
    expanded: Annotated[
        bool,
        typer.Option("--expanded", help="Write the merged heads repeated, for the stock class: saves nothing."),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Seed of whatever draws.")] = 0,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            help="Store floats as bfloat16, float16, float32 or float64.",
            show_default="as they are",
        ),
    ] = None,
    max_shard_size: Annotated[
        int | None,
        typer.Option(
            "--max-shard-size",
            parser=size,
            metavar="SIZE",
            help="E.g. 5GB.",
            show_default="the source's shards",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Discard an interrupted run.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model in DST, once the new one is whole.")
    ] = False,
    family: FamilyName = None,
    revision: Revision = None,
    offline: Offline = False,
    push_to_hub: Annotated[
        str | None,
        typer.Option("--push-to-hub", metavar="REPO", help="Upload the finished folder.", show_default=False),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a checkpoint with fewer KV heads, by pooling the heads of each group (with more: by repeating them)."""
    from gqaconvert.conversion import convert, convert_plan, make_recipe, plan_document

    if (kv_heads is None) != mqa:
        raise InputError("give either --kv-heads N or --mqa")
    if report is not None:
        from gqaconvert.merge import SITE_METHODS
        from gqaconvert.report import check_report_path

        check_report_path(report)
        if method not in SITE_METHODS:
            raise InputError(f"--report tells of methods that merge whole layers, not of {method}")
    if resume and restart:
        raise InputError("--resume and --restart contradict each other")
    options: RecipeOptions = {
        "method": method,
        "seed": seed,
        "dtype": dtype,
        "max_shard_size": max_shard_size,
        "family": family,
        "grouping": grouping,
        "calibrate": calibrate,
        "calibration_tokens": calibration_tokens,
        "refine": _steps(refine),
        "joint": joint,
        "expanded": expanded,
    }
    count = 1 if kv_heads is None else kv_heads
    if dry_run:
        recipe = make_recipe(count, **options)
        plan = convert_plan(source, recipe, revision=revision, offline=offline)
        if json:
            print_json(plan_document(plan, destination))
        else:
            _show_plan(plan, destination)
        return
    with byte_progress("converting", show=not (json or quiet)) as (set_total, advance):
        result = convert(
            source,
            destination,
            count,
            **options,
            revision=revision,
            offline=offline,
            resume=resume,
            restart=restart,
            overwrite=overwrite,
            push_to_hub=push_to_hub,
            on_plan=lambda plan: set_total(plan.work_bytes + sum(shard.nbytes for shard in plan.shards)),
            on_progress=advance,
            on_site=lambda facts: None if quiet or json else _show_site(facts),
            on_step=lambda *step: None if quiet or json else _show_step(*step),
        )
    if report is not None:
        from gqaconvert.report import write_report

        write_report(report, f"{source} to {count} KV heads by {method}", result.sites)
    if json:
        print_json(result.to_json())
    elif not quiet:
        _show_result(result)


FORM_NOTES: dict[str, tuple[str, ...]] = {
    "stock": (),
    "shipped code": (
        "the stock class cannot hold fewer KV heads: the output brings modeling_gqaconvert.py, and loads with "
        "from_pretrained(..., trust_remote_code=True)",
    ),
    "expanded": ("--expanded: every merged head is stored as often as it is read; neither weights nor cache shrink",),
}


def _steps(refine: str | None) -> int | str | None:
    if refine is None or refine == "auto":
        return refine
    if not refine.isdecimal():
        raise InputError(f"--refine {refine}: give a number of steps, or auto")
    return int(refine)


def _show_site(facts: Mapping[str, Any]) -> None:
    """One line a layer, as soon as it is merged; only where there is something to watch."""
    if "error_after" in facts:
        note(
            f"layer {facts['layer']}: error {facts['error_before']:.5f} -> {facts['error_after']:.5f} "
            f"after {facts['steps']} steps (K kept {_mean(facts['key_explained']):.0%}, "
            f"V {_mean(facts['value_explained']):.0%})"
        )


def _show_step(step: int, steps: int, loss: float) -> None:
    if step == steps or step % max(1, steps // 10) == 0:
        note(f"joint step {step} of {steps}: KL(source || merged) {loss:.4f} nats a token")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _show_result(result: "ConversionResult") -> None:
    from gqaconvert.planning import cache_bytes_per_token
    from gqaconvert.units import format_size

    plan = result.plan
    source, cache = plan.source_geometry, cache_bytes_per_token(plan)
    layers, before = len({site.layer for site in plan.checkpoint.sites}), plan.checkpoint.index.total_size
    note(
        f"{result.destination}: {source.num_key_value_heads} -> {plan.recipe.num_key_value_heads} KV heads in "
        f"{layers} layers, weights {format_size(before)} -> "
        f"{format_size(plan.total_size)}, KV cache per token {format_size(cache['source'])} -> "
        f"{format_size(cache['target'])}"
    )
    for line in FORM_NOTES[plan.form_name]:
        note(line)
    if plan.recipe.num_key_value_heads < source.num_key_value_heads and not plan.work:
        note("before uptraining, expect much worse text than the source's; --method subspace --refine auto keeps more")
    if plan.work and plan.recipe.calibration is None:
        note(
            "note: merged from the weights alone; activations of large models have a few huge "
            "directions that weights do not show, so --calibrate keeps far more of them"
        )
    for limit in sorted({limit for work in plan.work for limit in work.freedom.limits}):
        note(f"note: {limit}")
    left_out = plan.sidecars.left_out
    for name, reason in list(left_out.items())[:5]:
        note(f"not carried over: {name} ({reason})")
    if len(left_out) > 5:
        note(f"not carried over: {len(left_out) - 5} more files (--json lists them)")
    if caution := plan.family.caution_for(plan.checkpoint.config.text):
        note(f"note: {caution}")
    if result.commit_url:
        note(f"uploaded: {result.commit_url}")


def _show_plan(plan: "ConversionPlan", destination: str) -> None:
    from rich import box
    from rich.table import Table

    from gqaconvert.conversion import plan_document
    from gqaconvert.units import format_size

    document = plan_document(plan, destination)
    console = new_console()
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    heads, cache = document["num_key_value_heads"], document["cache_bytes_per_token"]
    config = ", ".join(f"{key}: {value}" for key, value in plan.config_changes.items())
    for label, value in (
        ("source", plan.checkpoint.files.label),
        ("destination", f"{destination} (nothing is written: --dry-run)"),
        ("KV heads", f"{heads['source']} -> {heads['target']} (method {plan.recipe.method})"),
        ("form", "; ".join((plan.form_name, *FORM_NOTES[plan.form_name]))),
        ("cache/token", f"{format_size(cache['source'])} -> {format_size(cache['target'])}"),
        ("config.json", config),
        ("tensors", f"{len(plan.changed)} change, {document['unchanged_tensors']} stay byte for byte"),
        ("output", f"{format_size(plan.output_bytes)}, free there: {format_size(document['free_bytes'])}"),
        ("files", ", ".join(document["files"]) or "none"),
        ("left out", ", ".join(f"{name} ({why})" for name, why in plan.sidecars.left_out.items()) or "none"),
    ):
        facts.add_row(label, safe(value))
    console.print(facts)
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("shard", "changed tensor", "from", "to"):
        table.add_column(column, overflow="fold")
    for shard in plan.shards:
        changed = [tensor for tensor in shard.tensors if tensor.changed]
        for number, tensor in enumerate(changed):
            label = f"{shard.name} ({format_size(shard.nbytes)})" if number == 0 else ""
            table.add_row(safe(label), safe(tensor.name), str(list(tensor.source.shape)), str(list(tensor.shape)))
        if not changed:
            table.add_row(safe(f"{shard.name} ({format_size(shard.nbytes)})"), "none", "", "")
    console.print(table)
