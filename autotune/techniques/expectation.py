"""What a technique is expected to do to time and memory, before a model was seen with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Factor:
    """What a choice multiplies something by, known only roughly: lognormal.

    Attributes:
        typical: the median.
        spread: one standard deviation, as a factor: two thirds of all models lie within `typical / spread` to
            `typical * spread`.
    """

    typical: float = 1.0
    spread: float = 1.0


UNTOUCHED = Factor()


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What a choice is expected to do, compared with the technique switched off.

    The predictors in `autotune.prediction` start from it and correct it by every probe.

    Attributes:
        compute: the time of forward and backward per sample, once the device is busy.
        launch: the time of a micro step that does not depend on its size.
        update: the time of the optimizer's step.
        data: the time that training waits for samples.
        state: the memory of parameters, gradients and optimizer state.
        activations: the memory that grows with the micro batch.
        untraced: the memory that tracing does not show: libraries' workspaces, kernels that they compile and keep.
        setup_s: seconds of preparation before the first step that plain training does not need, such as compiling.
    """

    compute: Factor = UNTOUCHED
    launch: Factor = UNTOUCHED
    update: Factor = UNTOUCHED
    data: Factor = UNTOUCHED
    state: Factor = UNTOUCHED
    activations: Factor = UNTOUCHED
    untraced: Factor = UNTOUCHED
    setup_s: float = 0.0
