"""What holds for every test: one thread a process, since several run at once and the models are tiny."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, and inherited by the processes we start
