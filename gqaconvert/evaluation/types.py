"""What is asked of an evaluation, and what it finds. No torch."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

SCHEMA = "gqaconvert.evaluate/1"
Task = Literal["perplexity", "passkey", "needle", "generate", "alr", "probe"]
TASKS: tuple[Task, ...] = ("perplexity", "passkey", "needle", "generate", "alr", "probe")
QuestionPlace = Literal["later", "known"]


@dataclass(frozen=True)
class EvaluateOptions:
    """What is measured.

    Attributes:
        task: one of `TASKS`.
        policies: as they are written; those without an amount are measured at every budget.
        budgets: parts of the length, as they are written.
        lengths: tokens of a window, or of a context; empty for the model's context, at most 512.
        windows: windows of text, or prompts at each depth.
        chunk: tokens that are read at once; 0 for all. None: 1 for perplexity, else all.
        text: file of text; None for the packaged held-out text.
        question: "later": the context is evicted before the question is read; "known": it is read with the question.
        new_tokens: that "generate" writes.
        kv_heads: that "probe" leaves a layer.
        seed: of what is hidden in contexts.
        trust_remote_code: run a checkpoint's own code.
    """

    task: Task = "perplexity"
    policies: tuple[str, ...] = ("tova", "window+sinks", "window", "l2")
    budgets: tuple[str, ...] = ("1/8", "1/4", "1/2")
    lengths: tuple[int, ...] = ()
    windows: int = 4
    chunk: int | None = None
    text: str | None = None
    question: QuestionPlace = "later"
    new_tokens: int = 32
    kv_heads: int = 1
    seed: int = 0
    trust_remote_code: bool = False


@dataclass(frozen=True)
class PolicyRow:
    """One policy at one budget on one model.

    Attributes:
        model: as the user called it.
        policy: in full, with its amount.
        budget: part of the length, None where the policy names its own amount, or is full.
        length: tokens.
        value: perplexity; or the part of answers, or of generated tokens, that are right.
        held_bytes: of keys and values in the end, a sequence, measured from storage.
        peak_bytes: the most at once, a sequence.
        tokens_per_second: read and written, all sequences together.
        examples: texts, for those who want to look.
    """

    model: str
    policy: str
    budget: str | None
    length: int
    value: float
    held_bytes: int
    peak_bytes: int
    tokens_per_second: float
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class LayerNorms:
    """How well the keys' norms predict attention in one layer.

    Attributes:
        model: as the user called it.
        layer: its number.
        heads: of each KV head, its ALR relative to a random order's: 0 is the best order, 1 is chance.
    """

    model: str
    layer: int
    heads: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the heads."""
        return sum(self.heads) / len(self.heads)


@dataclass(frozen=True)
class LayerProbe:
    """What it costs to touch one layer only, in nats a token above the untouched model.

    Attributes:
        model: as the user called it.
        layer: its number.
        pooled: its KV heads are merged by their mean.
        constant: its attention is its mean over texts (Hassid et al., EMNLP Findings 2022); None where it has a window,
            or code of its own.
    """

    model: str
    layer: int
    pooled: float
    constant: float | None


@dataclass(frozen=True)
class Evaluation:
    """Everything that was found.

    Attributes:
        options: what was asked for.
        models: as the user called them.
        chunk: tokens that were read at once, 0 for all.
        rows: of the tasks that compare policies.
        norms: of the task "alr".
        probes: of the task "probe", by layer.
        baseline: model -> loss of the untouched model in nats a token, of the task "probe".
        advice: sentences for people.
        notes: what else they should know.
    """

    options: EvaluateOptions
    models: tuple[str, ...]
    chunk: int
    rows: tuple[PolicyRow, ...] = ()
    norms: tuple[LayerNorms, ...] = ()
    probes: tuple[LayerProbe, ...] = ()
    baseline: dict[str, float] = field(default_factory=dict)
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {"schema": SCHEMA, **asdict(self)}
