"""Uptraining: data, budget, trainers. None of its modules is imported at the command line's start-up."""

import os

DEFAULT_LEARNING_RATE = 2e-5
"""Peak, for short runs. Of a well merged model of 135 M parameters, distilled on 24 x 1,024 tokens, 3e-4 raised the
held-out loss, 5e-5 lowered it but not at every evaluation, 2e-5 at each and by more."""


def is_launched() -> bool:
    """Whether this is one of several processes that a launcher started."""
    return "LOCAL_RANK" in os.environ
