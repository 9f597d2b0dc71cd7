"""Pictures of an evaluation (extra ``plot``)."""

from pathlib import Path
from typing import Any

from gqaconvert.errors import InputError, MissingExtraError
from gqaconvert.evaluation.types import Evaluation
from gqaconvert.units import MIB

_SUFFIXES = (".png", ".svg")


def check_plot_path(path: Path) -> None:
    """Refuse early what could only fail after the work.

    Raises:
        InputError: another suffix, or no such folder.
        MissingExtraError: matplotlib is not installed.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise InputError(f"--plot {path}: the name has to end in one of {', '.join(_SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise InputError(f"--plot {path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingExtraError("matplotlib", "plot") from None


def write_plot(path: Path, found: Evaluation) -> None:
    """Draw it.

    Raises:
        InputError: the suffix is none of .png, .svg.
        MissingExtraError: matplotlib is not installed.
    """
    check_plot_path(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if found.norms:
        figure = Figure(figsize=(9, 1.5 + 2.2 * len(found.models)), layout="constrained")
        _heat(figure, found)
    elif found.probes:
        figure = Figure(figsize=(9, 1 + 2.8 * len(found.models)), layout="constrained")
        _bars(figure, found)
    else:
        lengths = sorted({row.length for row in found.rows})
        figure = Figure(figsize=(1 + 5 * len(lengths), 4.5), layout="constrained")
        _lines(figure, found, lengths)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=130)


def _lines(figure: Any, found: Evaluation, lengths: list[int]) -> None:  # noqa: ANN401
    axes = figure.subplots(1, len(lengths), squeeze=False)[0]
    for axis, length in zip(axes, lengths, strict=True):
        rows = [row for row in found.rows if row.length == length]
        for model in found.models:
            style = "-o" if model == found.models[0] else "--s"
            of_model = [row for row in rows if row.model == model]
            full = next(row for row in of_model if row.policy == "full")
            label = "" if len(found.models) == 1 else f" {Path(model).name}"
            axis.plot(full.held_bytes / MIB, full.value, "k*" if style == "-o" else "kP", label=f"full{label}")
            kinds = dict.fromkeys(row.policy.partition(":")[0] for row in of_model if row.policy != "full")
            for number, kind in enumerate(kinds):
                points = sorted(
                    (row.held_bytes / MIB, row.value) for row in of_model if row.policy.partition(":")[0] == kind
                )
                axis.plot(*zip(*points, strict=True), style, color=f"C{number}", markersize=4, label=f"{kind}{label}")
        axis.set_xlabel("keys and values held, MiB a sequence")
        axis.set_title(f"{length:,} tokens")
        axis.grid(alpha=0.3)
        values = [row.value for row in rows]
        if found.options.task == "perplexity":
            axis.set_ylabel("perplexity")
            if max(values) > 4 * min(values):
                axis.set_yscale("log")
        else:
            axis.set_ylabel({"generate": "part of tokens as with the full cache"}.get(found.options.task, "accuracy"))
            axis.set_ylim(-0.03, 1.03)
        axis.legend(fontsize=8)


def _heat(figure: Any, found: Evaluation) -> None:  # noqa: ANN401
    axes = figure.subplots(len(found.models), 1, squeeze=False)[:, 0]
    image = None
    for axis, model in zip(axes, found.models, strict=True):
        layers = [norms for norms in found.norms if norms.model == model]
        heads = max(len(norms.heads) for norms in layers)
        table = [[norms.heads[head] if head < len(norms.heads) else float("nan") for norms in layers]
                 for head in range(heads)]  # fmt: skip
        image = axis.imshow(table, aspect="auto", cmap="RdYlGn_r", vmin=0, vmax=2)
        axis.set_title(f"{Path(model).name}: 0 = norms order keys as attention does, 1 = chance", fontsize=10)
        axis.set_ylabel("KV head")
        axis.set_xlabel("layer")
        axis.set_yticks(range(heads))
        axis.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=list(axes), label="ALR / chance")


def _bars(figure: Any, found: Evaluation) -> None:  # noqa: ANN401
    axes = figure.subplots(len(found.models), 1, squeeze=False)[:, 0]
    for axis, model in zip(axes, found.models, strict=True):
        layers = [probe for probe in found.probes if probe.model == model]
        places = [probe.layer for probe in layers]
        axis.bar([place - 0.2 for place in places], [probe.pooled for probe in layers], 0.4, label="KV heads pooled")
        constant = [(place + 0.2, probe.constant) for place, probe in zip(places, layers, strict=True)
                    if probe.constant is not None]  # fmt: skip
        if constant:
            axis.bar(*zip(*constant, strict=True), 0.4, label="constant attention")
        axis.set_title(f"{Path(model).name}: what touching one layer costs", fontsize=10)
        axis.set_xlabel("layer")
        axis.set_ylabel("nats a token")
        axis.grid(axis="y", alpha=0.3)
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(fontsize=8)
