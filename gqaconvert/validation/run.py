"""Run a validation: the levels one after the other, each with what the ones before have opened."""

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from threading import Lock
from time import monotonic

from gqaconvert.checkpoint.source import fetch_source
from gqaconvert.errors import CheckpointError, EnvironmentFailure, InputError, MissingExtraError
from gqaconvert.memory import free_memory
from gqaconvert.texts import text_path
from gqaconvert.validation.files_level import validate_alone, validate_files
from gqaconvert.validation.pair import Pair, open_pair
from gqaconvert.validation.record import read_record
from gqaconvert.validation.types import (
    LEVELS,
    NORMAL,
    Check,
    Level,
    Quality,
    Settings,
    TensorError,
    ValidationReport,
    skipped,
    verdict,
)


def validate(
    source: str | None,
    destination: str,
    settings: Settings | None = None,
    *,
    revision: str | None = None,
    offline: bool = False,
    family: str | None = None,
    on_total: Callable[[int], None] = lambda total: None,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> ValidationReport:
    """Validate a conversion.

    Args:
        source: folder or Hub id of what was converted; None if it is gone, which leaves the files level.
        destination: folder or Hub id of the result.
        settings: how far to go, and thresholds.
        revision: of the source.
        offline: use only what the Hub's cache holds.
        family: vouches for an unknown model_type.
        on_total: told the bytes to compare, before the comparison.
        advance: told bytes as they are compared; called in several threads, one at a time.

    Raises:
        InputError: bad input, so that there is no verdict at all.
        MissingExtraError: a level was asked for that needs transformers.
        StorageError: a file cannot be read.
        EnvironmentFailure: a level was asked for that needs more memory than is free.
    """
    settings = settings or Settings()
    advance = _one_at_a_time(advance)
    level, chosen = _level(settings, alone=source is None)
    if settings.text is not None:
        text_path(settings.text)
    folder = fetch_source(destination, offline=offline)
    if source is None:
        checks = validate_alone(folder, advance, family=family)
        record = read_record(folder)
        method = record.method if record.present else None
        return ValidationReport(None, destination, method, level, None, tuple(checks))
    pair = open_pair(fetch_source(source, revision=revision, offline=offline), folder, family=family)
    on_total(sum(tensor.source.nbytes for tensor in pair.expected))
    checks, errors = validate_files(pair, advance)
    quality: Quality | None = None
    if level != "files":
        if any(check.status == "failed" and check.name in _LOADABLE for check in checks):
            checks += [skipped("logits.loading", "the files' structure is wrong: no model is run")]
        else:
            run, quality = _run_models(pair, settings, level, defaulted=not chosen)
            checks += run
    notes = _notes(pair, level)
    return ValidationReport(
        source, destination, pair.method, level, pair.kv_heads, tuple(checks), _by_layer(errors), quality, notes
    )


def _one_at_a_time(advance: Callable[[int], None]) -> Callable[[int], None]:
    lock = Lock()

    def locked(nbytes: int) -> None:
        with lock:
            advance(nbytes)

    return locked


_LOADABLE = frozenset(("files.index", "files.tensors", "files.shapes"))


def _level(settings: Settings, *, alone: bool) -> tuple[Level, bool]:
    """The last level to run, and whether somebody asked for it."""
    transformers = find_spec("transformers") is not None
    limits = {"--max-ppl-ratio": settings.max_ppl_ratio, "--max-kl": settings.max_kl, "--min-top1": settings.min_top1}
    given = [name for name, limit in limits.items() if limit is not None]
    for name in given:
        if not (math.isfinite(limit := limits[name] or 0.0) and limit >= 0) or (name == "--min-top1" and limit > 1):
            raise InputError(f"{name} {limits[name]}: no sensible limit")
    if given and settings.level is None and not alone:
        settings = replace(settings, level="quality")
    if given and settings.level != "quality":
        raise InputError(f"{given[0]} is judged at the level quality", hint="leave out --level, and give SRC and DST")
    if alone:
        if settings.level not in (None, "files"):
            raise InputError(f"--level {settings.level} compares with the source", hint="give SRC and DST")
        return "files", True
    if settings.level is not None:
        if settings.level not in LEVELS:
            raise InputError(f"--level {settings.level}: one of {', '.join(LEVELS)}")
        if settings.level != "files" and not transformers:
            raise MissingExtraError("transformers", "transformers")
        return settings.level, True
    return "quality" if transformers else "files", False


def _run_models(pair: Pair, settings: Settings, level: Level, *, defaulted: bool) -> tuple[list[Check], Quality | None]:
    from gqaconvert.stock import load_stock
    from gqaconvert.validation.logits_level import validate_logits

    if pair.config.raw.get("is_encoder_decoder"):
        return [skipped("logits.loading", "an encoder-decoder: logits are compared for decoders only")], None
    lack = _lack_of_memory(pair, settings, level)
    if lack is not None:
        if not defaulted:
            raise EnvironmentFailure(lack, hint="--level files streams and needs little")
        return [skipped("logits.loading", lack)], None
    name, begun = "logits.loading", monotonic()
    try:
        model, faults = load_stock(pair.folder, attention="eager")
    except CheckpointError as error:
        return [verdict(name, [error.message], "", "the stock loader refuses the folder")], None
    source, _ = load_stock(pair.source_folder, attention="eager")
    good = "the stock class takes every tensor and misses none"
    checks = [verdict(name, faults, good, "the stock class does not fit", seconds=monotonic() - begun)]
    quality: Quality | None = None
    later: list[Check] = []
    if level == "quality":
        from gqaconvert.validation.quality_level import judge, measure

        begun = monotonic()
        try:
            quality = measure(pair, source, model, settings)
        except InputError as error:
            if not defaulted:
                raise
            later = [skipped("quality.perplexity", error.message)]
        else:
            later = judge(quality, settings, monotonic() - begun)
    # The reference is made out of the source's model, so it comes last.
    checks += validate_logits(pair, source, model, settings)
    del source, model
    gc.collect()
    return [*checks, *later], quality


def _lack_of_memory(pair: Pair, settings: Settings, level: Level) -> str | None:
    """What two models in float32 and their activations take, where that is more than there is; None if it fits."""
    free = free_memory()
    weights = 4 * sum(tensor.source.numel + math.prod(tensor.shape) for tensor in pair.expected)
    needed = weights
    if level == "quality":
        from gqaconvert.validation.quality_level import activations

        needed += activations(pair, settings)
    if free is None or needed <= free:
        return None
    return (
        f"two models in float32 with what they compute take {needed / 2**30:.1f} GiB "
        f"({weights / 2**30:.1f} of weights), and {free / 2**30:.1f} GiB are free"
    )


def _by_layer(errors: list[TensorError]) -> tuple[TensorError, ...]:
    return tuple(sorted(errors, key=lambda error: (error.layer, error.name)))


def _notes(pair: Pair, level: Level) -> tuple[str, ...]:
    notes = []
    if level != "files":
        notes.append("models were loaded and run in float32, whatever type their weights are stored in")
    if pair.record.trained is not None:
        notes.append(
            f"uptrained since the conversion ({pair.record.trained}): trained weights are only asked to be finite, and "
            "the logits' reference has them too"
        )
    elif level == "quality" and pair.kv_heads < pair.source.sites[0].geometry.num_key_value_heads:
        notes.append(NORMAL)
    if not pair.record.present:
        notes.append("no gqaconvert.json: taken for a conversion by mean")
    return tuple(notes)
