"""The learning rate and the order of things, as functions of the step. No torch."""


def learning_rate(step: int, steps: int, *, peak: float, warmup: float, decay: float) -> float:
    """Warm-up, plateau, linear decay to zero; above zero at every step.

    Args:
        step: 0 for the first.
        steps: of the whole run.
        peak: of the plateau.
        warmup: part of the steps.
        decay: part of the steps, at the end; the step after the last would have rate 0.
    """
    rising = max(1, round(warmup * steps))
    falling = max(1, round(decay * steps))
    return peak * min(1.0, (step + 1) / rising, (steps - step) / falling)


def is_spike(loss: float, before: list[float]) -> bool:
    """Whether a loss stands out from the (at most 50) losses before it: by a fifth and by six mean deviations.

    The paper (Ainslie et al., EMNLP 2023, appendix A) found multi-query models unstable in training.
    """
    if len(before) < 10:
        return False
    mean = sum(before) / len(before)
    spread = sum(abs(value - mean) for value in before) / len(before)
    return loss > 1.2 * mean and loss > mean + 6 * spread
