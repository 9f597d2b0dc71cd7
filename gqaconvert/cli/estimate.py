"""``gqaconvert estimate``."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gqaconvert.cli.options import FamilyName, Json, Offline, Revision, count, size
from gqaconvert.cli.output import new_console, print_json, safe
from gqaconvert.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from gqaconvert.kvcache.costs import Gpu
    from gqaconvert.kvcache.estimate import Estimate, Row

_SUFFIX = {"": 1, "k": 2**10, "m": 2**20}
_BAR = 40
_LEAST_COLUMNS = 4

Source = Annotated[
    str, typer.Argument(metavar="SRC", help="A checkpoint's folder, a Hub id, or a config.json.", show_default=False)
]


def estimate_command(
    source: Source,
    context: Annotated[
        str | None,
        typer.Option("--context", metavar="4k,32k", help="Tokens a sequence; 1k = 1024.", show_default="4k,32k,128k"),
    ] = None,
    batch: Annotated[str, typer.Option("--batch", metavar="1,8", help="Sequences.")] = "1",
    kv_heads: Annotated[
        str | None,
        typer.Option("--kv-heads", metavar="8,4,1", help="Counts to compare.", show_default="all that can be written"),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype",
            help="float32, float16, bfloat16, fp8, int8, int4, q8_0, q4_0, nvfp4.",
            show_default="the model's",
        ),
    ] = None,
    key_dtype: Annotated[str | None, typer.Option("--key-dtype", help="Of keys only.", show_default=False)] = None,
    value_dtype: Annotated[
        str | None, typer.Option("--value-dtype", help="Of values only.", show_default=False)
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel devices.")] = 1,
    block: Annotated[int, typer.Option("--block", min=1, help="Tokens a block of a paged cache.")] = 1,
    policy: Annotated[
        str | None,
        typer.Option("--policy", metavar="tova:512|l2:1/2:skip=0,1", help="What evicts: KIND:ENTRIES or KIND:RATIO."),
    ] = None,
    runtime: Annotated[
        str, typer.Option("--runtime", help="engine, or transformers (what its DynamicCache holds).")
    ] = "engine",
    mla: Annotated[str, typer.Option("--mla", help="absorbed (latent) or expanded (full heads).")] = "absorbed",
    encoder_tokens: Annotated[
        int | None,
        typer.Option("--encoder-tokens", min=1, help="Length of the encoder's output.", show_default="its longest"),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", metavar="24GiB|h100", help="What fits; by name also the least time of a step."),
    ] = None,
    utilisation: Annotated[
        float, typer.Option("--utilisation", min=0.01, max=1.0, help="Part of the GPU's memory to fill.")
    ] = 0.9,
    weights: Annotated[
        int | None,
        typer.Option("--weights", parser=size, metavar="SIZE", help="Of the weights.", show_default="as stored"),
    ] = None,
    alpha: Annotated[
        float | None, typer.Option("--alpha", help="Uptraining: part of the pre-training.", show_default="0.05")
    ] = None,
    pretrain_tokens: Annotated[
        int | None,
        typer.Option("--pretrain-tokens", parser=count, metavar="2T", help="Tokens of the pre-training."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Also write a .png, .svg or .html chart.")
    ] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    json: Json = False,
    family: FamilyName = None,
    revision: Revision = None,
    offline: Offline = False,
) -> None:
    """Say what the KV cache costs, now and with fewer KV heads, and what fits. Reads config and headers only."""
    from gqaconvert.kvcache.dtypes import cache_dtype
    from gqaconvert.kvcache.estimate import Question, estimate
    from gqaconvert.kvcache.layers import CacheSettings, runtime_named
    from gqaconvert.kvcache.plots import check_plot_path, to_csv, write_plot
    from gqaconvert.policies.spec import KVPolicy

    if csv and json:
        raise InputError("--csv and --json contradict each other")
    if mla not in ("absorbed", "expanded"):
        raise InputError(f"--mla {mla}: absorbed or expanded")
    if plot is not None:
        check_plot_path(plot)
    key, value = key_dtype or kv_dtype, value_dtype or kv_dtype
    answer = estimate(
        source,
        Question(
            contexts=_numbers(context, "--context", _SUFFIX) if context else None,
            batches=_numbers(batch, "--batch", _SUFFIX),
            kv_heads=_numbers(kv_heads, "--kv-heads", _SUFFIX) if kv_heads else None,
            key=cache_dtype(key) if key else None,
            value=cache_dtype(value) if value else None,
            settings=CacheSettings(
                tensor_parallel=tp, block=block, runtime=runtime_named(runtime), expand_latent=mla == "expanded",
                policy=KVPolicy.parse(policy) if policy else None,
            ),
            encoder_tokens=encoder_tokens,
            gpu=_gpu(gpu) if gpu else None,
            utilisation=utilisation,
            weights=weights,
            alpha=alpha,
            pretrain_tokens=pretrain_tokens,
        ),
        revision=revision,
        offline=offline,
        family=family,
    )  # fmt: skip
    if plot is not None:
        write_plot(plot, answer)
    if json:
        print_json(answer.to_json())
    elif csv:
        print(to_csv(answer), end="")
    else:
        _show(answer)


def _numbers(text: str, option: str, suffixes: dict[str, int]) -> tuple[int, ...]:
    """Whole numbers with suffixes, in the order given, each once."""
    numbers = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,6})?)([a-z]?)", part.strip().lower())
        number = int(float(match[1]) * suffixes[match[2]]) if match and match[2] in suffixes else 0
        if number < 1 or ("." in part and not match[2]) or number > 2**60:  # type: ignore[index]
            raise InputError(f"{option} {text}: positive whole numbers, separated by commas")
        numbers.append(number)
    return tuple(dict.fromkeys(numbers))


def _gpu(text: str) -> "Gpu":
    from gqaconvert.kvcache.costs import GPUS, Gpu
    from gqaconvert.units import parse_size

    if text.lower() in GPUS:
        return GPUS[text.lower()]
    try:
        return Gpu(text, parse_size(text))
    except ValueError:
        raise InputError(f"--gpu {text}: a size such as 24GiB, or one of {', '.join(GPUS)}") from None


def _show(answer: "Estimate") -> None:
    console = new_console()
    _facts(answer, console)
    _table(answer, console)
    _chart(answer, console)
    if answer.fits:
        _fits(answer, console)
    if answer.uptraining:
        cost = answer.uptraining
        hours = f", {_plain(cost.gpu_hours)} GPU-hours at {cost.utilisation:.0%} of peak" if cost.gpu_hours else ""
        console.print(f"uptraining at alpha {cost.alpha:g}: {cost.tokens:,} tokens, {cost.flops:.3g} operations{hours}")
    for line in answer.notes:
        console.print(f"note: {safe(line)}")


def _plain(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.2g}"


def _duration(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.2f} us"


def _facts(answer: "Estimate", console: "Console") -> None:
    from rich.table import Table

    from gqaconvert.kvcache.layers import summary
    from gqaconvert.units import format_size

    model, settings = answer.model, answer.settings
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    heads = "no KV heads"
    if model.num_key_value_heads:
        heads = f"{model.num_attention_heads} query heads, {model.num_key_value_heads} KV heads"
    caches = ", ".join(f"{count} {kind}" for kind, count in summary(model))
    held = f"keys {settings.key.name}, values {settings.value.name}, as held by: {settings.runtime}"
    if settings.tensor_parallel > 1:
        held += f", {settings.tensor_parallel} devices"
    if settings.block > 1:
        held += f", blocks of {settings.block}"
    if settings.policy:
        held += f", policy {settings.policy}"
    rows = [
        ("model", f"{answer.source} ({model.model_type})"),
        ("layers", f"{model.num_hidden_layers}: {caches} ({model.pattern})"),
        ("attention", heads),
        ("cache", held),
    ]
    if answer.weights:
        rows.append(("weights", f"{format_size(answer.weights.nbytes)} (from {answer.weights.source})"))
    for label, text in rows:
        grid.add_row(label, safe(text))
    console.print(grid)


def _columns(answer: "Estimate") -> list[tuple[str, Any]]:
    from gqaconvert.units import format_size

    def seconds(row: "Row") -> str:
        return _duration(row.decode.seconds) if row.decode and row.decode.seconds is not None else "unknown"

    columns: list[tuple[str, Any]] = [
        ("KV heads", lambda row: str(row.num_key_value_heads or "none")),
        ("context", lambda row: f"{row.context:,}"),
        ("batch", lambda row: f"{row.batch:,}"),
        ("cache", lambda row: format_size(row.cache_bytes)),
    ]
    if answer.settings.tensor_parallel > 1:
        columns.append(("each device", lambda row: format_size(row.cache_bytes_per_device)))
    if answer.settings.policy:
        columns.append(("of full", lambda row: f"{row.effective_factor:.1%}"))
        columns.append(("prefill peak", lambda row: format_size(row.prefill_peak_bytes)))
    if any(row.decode for row in answer.rows):
        columns.append(("read a step", lambda row: format_size(row.decode.bytes_read)))
    if answer.gpu and answer.gpu.bandwidth and any(row.decode for row in answer.rows):
        columns.append(("step, at least", seconds))
        columns.append(("bound by", lambda row: row.decode.bound_by))
        columns.append(("ops/byte", lambda row: f"{row.decode.intensity:.1f}"))
    return columns


def _table(answer: "Estimate", console: "Console") -> None:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    columns = [(name, cell, max(len(cell(row)) for row in answer.rows)) for name, cell in _columns(answer)]
    roomy = sum(max(width, len(name)) + 3 for name, _, width in columns) < console.width
    # Headers wrap where the terminal is narrow, numbers never: the last columns go first (--json has them all).
    columns = [(name, cell, max(width, *map(len, name.split()))) for name, cell, width in columns]
    while len(columns) > _LEAST_COLUMNS and sum(width + 3 for _, _, width in columns) >= console.width:
        columns.pop()
    for name, _, width in columns:
        table.add_column(name, justify="right", width=None if roomy else width)
    for row in answer.rows:
        style = "bold" if row.num_key_value_heads == answer.model.num_key_value_heads else None
        table.add_row(*(cell(row) for _, cell, _ in columns), style=style)
    console.print(table)


def _chart(answer: "Estimate", console: "Console") -> None:
    from gqaconvert.kvcache.plots import chart_rows, chart_title
    from gqaconvert.units import format_size

    rows = chart_rows(answer)
    largest = max(row.cache_bytes for row in rows)
    if len(rows) < 2 or not largest:
        return
    console.print(f"[bold]cache at {chart_title(rows[0])}, by KV heads[/bold]")
    for row in rows:
        cells = max(1, round(_BAR * row.cache_bytes / largest))
        console.print(
            f"{row.num_key_value_heads!s:>4} [cyan]{'█' * cells}[/cyan]{' ' * (_BAR - cells)}"
            f" {format_size(row.cache_bytes)}",
            no_wrap=True,
            crop=False,
        )
    console.print()


def _fits(answer: "Estimate", console: "Console") -> None:
    from rich import box
    from rich.table import Table

    from gqaconvert.units import format_size

    assert answer.gpu is not None
    devices = answer.settings.tensor_parallel
    title = f"fits on {devices} x {format_size(answer.gpu.memory)}, {answer.utilisation:.0%} of it used"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")
    table.add_column("KV heads", justify="right")
    table.add_column("weights each", justify="right")
    for context in answer.fits[0].largest_batch:
        table.add_column(f"batch at {int(context):,}", justify="right")
    for batch in answer.fits[0].longest_context:
        table.add_column(f"context at batch {batch}", justify="right")
    for fit in answer.fits:
        table.add_row(
            str(fit.num_key_value_heads or "none"), format_size(fit.weight_bytes_per_device),
            *(f"{count:,}" for count in fit.largest_batch.values()),
            *(f"{count:,}" for count in fit.longest_context.values()),
        )  # fmt: skip
    console.print(table)
