"""metrics.jsonl: one JSON object a line, written as it happens, cut back to the checkpoint on resumption."""

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from gqaconvert.checkpoint.writer import write_file
from gqaconvert.errors import CheckFailedError, StorageError
from gqaconvert.uptrain.curve import read_metrics
from gqaconvert.uptrain.job import OnEvent, Outcome
from gqaconvert.uptrain.schedule import is_spike

_WATCHED = 50


def require_finite(step: int, loss: float, grad_norm: float) -> None:
    """Refuse to go on with numbers that are none.

    Raises:
        CheckFailedError: the loss or the gradient's norm is not finite.
    """
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        raise CheckFailedError(
            f"step {step}: the loss is {loss}, the gradient's norm {grad_norm}",
            hint="start again with a smaller --lr, or a longer warm-up; the last checkpoint is untouched",
        )


class MetricsLog:
    """Appends to the metrics of a run. Records behind ``step``, which is resumed from, are dropped; None: all."""

    def __init__(self, path: Path, *, step: int | None, on_event: OnEvent) -> None:
        self._on_event = on_event
        earlier = read_metrics(path) if step is not None and path.exists() else []
        kept = [record for record in earlier if record.get("step", 0) <= (step or 0)]
        try:
            rewritten = path.with_suffix(".new")
            write_file(rewritten, "".join(json.dumps(record) + "\n" for record in kept).encode())
            rewritten.replace(path)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise StorageError(f"cannot write {path}: {error.strerror}") from error
        self.records = kept
        self._time = time.monotonic()

    def step(
        self,
        step: int,
        *,
        loss: float,
        tokens: int,
        lr: float,
        grad_norm: float,
        flops: int | None = None,
        peak_flops: float | None = None,
        **more: float | None,
    ) -> None:
        """A step was taken: ``loss`` is its mean in nats a token, ``tokens`` how many it saw.

        ``flops`` of the model for each token, and ``peak_flops`` of all devices together in a second, give the MFU
        (model FLOPs utilisation: Chowdhery et al. 2022, PaLM, appendix B).

        Raises:
            CheckFailedError: the loss or the gradient is not finite.
        """
        now = time.monotonic()
        seconds, self._time = now - self._time, now
        earlier = [record["loss"] for record in self.records[-2 * _WATCHED :] if "loss" in record][-_WATCHED:]
        require_finite(step, loss, grad_norm)
        record = {"step": step, "loss": loss, "lr": lr, "grad_norm": grad_norm, "tokens": step * tokens}
        record |= {name: value for name, value in more.items() if value is not None}
        record |= {"seconds": round(seconds, 4), "tokens_per_second": round(tokens / max(seconds, 1e-9), 1)}
        if flops and peak_flops:
            record["mfu"] = round(flops * tokens / max(seconds, 1e-9) / peak_flops, 4)
        if is_spike(loss, earlier):
            record["spike"] = True
        self.write(record)

    def write(self, record: dict[str, Any]) -> None:
        """Append any record that has a ``step``."""
        self.records.append(record)
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise StorageError(f"cannot write the metrics: {error.strerror}") from error
        self._on_event(record)

    def sync(self) -> None:
        """Force what was written to the disk."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def outcome(self, steps: int, *, finished: bool) -> Outcome:
        """What is to be said of a run that took so many steps."""
        losses = [record["loss"] for record in self.records if "loss" in record]
        tail = losses[-max(1, len(losses) // 10) :]
        return Outcome(
            finished=finished,
            steps=steps,
            first_loss=losses[0] if losses else None,
            last_loss=sum(tail) / len(tail) if tail else None,
            eval_before=self._evaluation(0),
            eval_after=self._evaluation(steps) if finished else None,
            spikes=tuple(record["step"] for record in self.records if record.get("spike")),
        )

    def _evaluation(self, step: int) -> float | None:
        return next((r["eval_loss"] for r in self.records if r["step"] == step and "eval_loss" in r), None)
