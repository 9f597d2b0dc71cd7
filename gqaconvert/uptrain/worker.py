"""``python -m gqaconvert.uptrain.worker JOB``: one of the processes of a job."""

import sys
from pathlib import Path

from gqaconvert.uptrain.processes import leave, work
from gqaconvert.uptrain.trainers import run_job

if __name__ == "__main__":
    leave(work(Path(sys.argv[1]), run_job))
