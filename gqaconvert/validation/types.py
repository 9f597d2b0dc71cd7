"""What flows through a validation: settings, checks, the report. No torch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from typing import Any, Literal

SCHEMA = "gqaconvert.validate/1"
Level = Literal["files", "logits", "quality"]
LEVELS: tuple[Level, ...] = ("files", "logits", "quality")
Status = Literal["passed", "failed", "skipped"]

NORMAL = (
    "before uptraining, a pooled model is much worse than its source, and that is normal: the example model's "
    "perplexity grows 3 to 6 times under mean pooling; the paper uptrains for 5 % of the original steps to regain most "
    "of it (Ainslie et al., EMNLP 2023, section 3). Without thresholds, quality is reported and never fails."
)


@dataclass(frozen=True)
class Check:
    """One question with its answer.

    Attributes:
        name: stable, e.g. ``files.untouched``.
        status: skipped means that it could not be asked; the message says why.
        message: one line.
        faults: what exactly is wrong, one line each.
        figures: numbers behind the answer.
        seconds: of work. Where checks share work the first of them has it all; hashes and comparisons go on in
            threads beside the rest, so that the sum may exceed the time that a person waits.
    """

    name: str
    status: Status
    message: str
    faults: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def level(self) -> str:
        """Which level it belongs to."""
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class TensorError:
    """How far one computed tensor is from the independent recomputation.

    Attributes:
        name: of the tensor.
        layer: of its attention module.
        max_abs: largest absolute difference.
        max_ulp: largest difference in units in the last place of the stored type.
        frobenius: norm of the difference relative to the norm of the expected tensor.
    """

    name: str
    layer: int
    max_abs: float
    max_ulp: int
    frobenius: float


@dataclass(frozen=True)
class LayerDrift:
    """One layer of the converted model beside the source's.

    Attributes:
        layer: number.
        drift: norm of the difference of the residual streams after the layer, relative to the source's norm.
        source_entropy: mean entropy of the source's attention, in nats.
        entropy: the same of the converted model.
    """

    layer: int
    drift: float
    source_entropy: float | None
    entropy: float | None


@dataclass(frozen=True)
class Quality:
    """How well the converted model predicts text, beside its source.

    Attributes:
        tokens: predicted tokens.
        window: tokens of a window.
        source_perplexity: exp of the mean negative log-likelihood a token.
        perplexity: the same of the converted model.
        kl: mean KL(source || converted) a token, in nats.
        top1: share of tokens for which both models predict the same next token.
        layers: where it drifts.
    """

    tokens: int
    window: int
    source_perplexity: float
    perplexity: float
    kl: float
    top1: float
    layers: tuple[LayerDrift, ...]

    @property
    def ratio(self) -> float:
        """Perplexity relative to the source's."""
        return self.perplexity / self.source_perplexity


@dataclass(frozen=True)
class Settings:
    """What a validation asks for.

    Attributes:
        level: the last level to run; None for the last that is possible here.
        atol: absolute tolerance of logits.
        rtol: tolerance relative to the largest logit.
        text: file for the quality level, None for the packaged sample.
        max_tokens: of the text.
        max_ppl_ratio: threshold, None for none; so the next two.
        max_kl: nats a token.
        min_top1: share.
    """

    level: Level | None = None
    atol: float = 1e-5
    rtol: float = 1e-4
    text: str | None = None
    max_tokens: int = 8192
    max_ppl_ratio: float | None = None
    max_kl: float | None = None
    min_top1: float | None = None


@dataclass(frozen=True)
class ValidationReport:
    """The outcome of a validation."""

    source: str | None
    destination: str
    method: str | None
    level: Level
    num_key_value_heads: int | None
    checks: tuple[Check, ...]
    errors: tuple[TensorError, ...] = ()
    quality: Quality | None = None
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that came out negative."""
        return tuple(check for check in self.checks if check.status == "failed")

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form; numbers that are not finite, which JSON has not, are null."""
        quality = None if self.quality is None else {**asdict(self.quality), "perplexity_ratio": self.quality.ratio}
        checks = [{"level": check.level, **asdict(check)} for check in self.checks]
        document = {**asdict(self), "checks": checks, "quality": quality}
        plain: dict[str, Any] = _finite({"schema": SCHEMA, "passed": self.passed, **document})
        return plain


def _finite(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def verdict(name: str, faults: Sequence[str], good: str, bad: str, *, seconds: float = 0.0, **figures: float) -> Check:
    """A check that fails if there is any fault."""
    if not faults:
        return Check(name, "passed", good, figures=figures, seconds=seconds)
    return Check(name, "failed", bad, tuple(faults), figures, seconds)


def skipped(name: str, why: str) -> Check:
    """A check that could not be asked."""
    return Check(name, "skipped", why)


def timed(ask: Callable[[], Check]) -> Check:
    """A check with the time that it takes to ask."""
    begun = monotonic()
    check = ask()
    return replace(check, seconds=monotonic() - begun)
