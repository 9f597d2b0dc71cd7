"""A trainer's process without a model: writes a step to the metrics every 50 ms until it is asked to stop."""

import json
import sys
import time
from pathlib import Path

from gqaconvert.errors import CheckFailedError
from gqaconvert.uptrain.job import Job, OnEvent, Outcome
from gqaconvert.uptrain.processes import Stopper, work


def train(job: Job, on_event: OnEvent) -> Outcome:
    stopper = Stopper(job)
    with job.metrics.open("w") as file:
        for step in range(1, job.steps + 1):
            file.write(json.dumps({"step": step, "loss": 1.0}) + "\n")
            file.flush()
            if stopper.wants():
                raise KeyboardInterrupt
            if job.learning_rate > 1:
                raise CheckFailedError("step 1: the loss is nan", hint="less")
            if job.learning_rate < 0:
                sys.exit(7)
            time.sleep(0.05)
    return Outcome(True, job.steps, 1.0, 1.0, None, 2.0, (3,))


if __name__ == "__main__":
    sys.exit(work(Path(sys.argv[1]), train))
