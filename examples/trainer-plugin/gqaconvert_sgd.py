"""A complete trainer backend: plain SGD, one process, no checkpoints, so that a killed run begins again."""

from pathlib import Path

import torch

from gqaconvert.uptrain.data import open_parts
from gqaconvert.uptrain.job import Capabilities, Job, OnEvent, Outcome
from gqaconvert.uptrain.loss import evaluate, loss_sums
from gqaconvert.uptrain.metrics import MetricsLog
from gqaconvert.uptrain.models import prepare_model
from gqaconvert.uptrain.processes import Stopper, catch_signals
from gqaconvert.uptrain.schedule import learning_rate


class SgdTrainer:
    name = "sgd"

    def capabilities(self) -> Capabilities:
        return Capabilities(losses=("lm",), trainable=("all", "attention", "kv"), processes=False, exact_resume=False)

    def check(self, job: Job) -> list[str]:
        return [f"sgd has no option {name}" for name in job.backend_options if name != "momentum"]

    def launch(self, job: Job) -> list[str] | None:
        return None  # it runs in the process that asks

    def run(self, job: Job, on_event: OnEvent) -> Outcome:
        data, held_out = open_parts(
            Path(job.tokens), Path(job.eval_tokens) if job.eval_tokens else None, job.eval_windows,
            seq_len=job.seq_len, packing=job.packing,
        )  # fmt: skip
        model, _ = prepare_model(job)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, momentum=float(job.backend_options.get("momentum", 0.0)))
        stopper = Stopper(job)
        with catch_signals(stopper), MetricsLog(job.metrics, step=None, on_event=on_event) as metrics:
            for step in range(job.steps):
                if held_out and step == 0:
                    metrics.write({"step": 0, "eval_loss": evaluate(model, held_out.ordered(job.micro_batch))})
                batch = data.batch(job.seed, step, job.batch_size)
                loss = 0.0
                for rows in batch.micro(job.micro_batch):
                    part = loss_sums(model, rows, loss="lm").total / batch.predicted
                    part.backward()  # type: ignore[no-untyped-call]
                    loss += float(part.detach())
                rate = learning_rate(step, job.steps, peak=job.learning_rate, warmup=job.warmup, decay=job.decay)
                optimizer.param_groups[0]["lr"] = rate
                norm = float(torch.nn.utils.clip_grad_norm_(trained, job.clip))
                optimizer.step()
                optimizer.zero_grad()
                tokens = job.batch_size * job.seq_len
                metrics.step(step + 1, loss=loss, tokens=tokens, lr=rate, grad_norm=norm)
                if stopper.wants():
                    raise KeyboardInterrupt
            if held_out:
                metrics.write({"step": job.steps, "eval_loss": evaluate(model, held_out.ordered(job.micro_batch))})
            model.save_pretrained(job.trained)
            return metrics.outcome(job.steps, finished=True)
