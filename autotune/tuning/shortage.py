"""When nothing fits into the memory: when to stop trying, how much would be needed, and what would fit."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.proposers.cost_model import LIKELY
from autotune.records.config import BATCH_SIZE, Choice, Config
from autotune.records.outcome import Kind
from autotune.tuning.state import Search
from autotune.units import format_bytes

UNLIKELY_TO_FIT = 0.03  # predicted chance to fit
MOST_UNLIKELY = 3  # probes that are run all the same: a prediction may be wrong
TELLING = 2.0  # from the lower to the upper bound of a prediction that is told


def may_fit(search: Search, config: Config) -> bool:
    """Whether there is any hope that a config fits."""
    prediction = search.cost_model.predict(search.history, config)
    return prediction is None or prediction.chance_to_fit >= UNLIKELY_TO_FIT


def is_hopeless(search: Search) -> bool:
    """Whether nothing fits, some probes failed as they were predicted to, and what is likeliest to fit would be another."""
    history = search.history
    if history.best is not None:
        return False
    foreseen = [
        trial
        for trial in history.searched
        if trial.prediction is not None
        and trial.prediction.chance_to_fit < UNLIKELY_TO_FIT
        and history.objective.does_not_fit(trial.outcome)
    ]
    if len(foreseen) < MOST_UNLIKELY:
        return False
    safest = search.cost_model.propose(history)
    return safest is not None and not may_fit(search, safest.config)


def least_need(search: Search, left: Config | None) -> str:
    """How much the config that needs least is predicted to need, in words; empty where that is not known to be too much.

    Args:
        left: the likeliest to fit of those that were not tried; None where none was left.
    """
    history = search.history
    configs = [config for config, o in history.known.items() if history.objective.does_not_fit(o)]
    configs += [left] if left is not None else []
    found = [search.cost_model.predict(history, config) for config in configs if history.space.answers(config)]
    known = [p for p in found if p and p.peak_high_bytes and p.peak_high_bytes < TELLING * (p.peak_low_bytes or 0)]
    least_bytes = min((p.peak_bytes for p in known if p.peak_bytes), default=0)
    if least_bytes <= history.objective.usable_bytes:
        return ""
    return (
        f"the smallest config is predicted to need about {format_bytes(least_bytes)}, and the limit of "
        f"{format_bytes(history.objective.memory_limit_bytes)} leaves {format_bytes(history.objective.usable_bytes)}"
    )


def what_was_left(search: Search, left: Config | None) -> str:
    """That a config which may fit was not tried yet, in words; empty where none was left."""
    if not search.history.searched or left is None or not may_fit(search, left):
        return ""
    named = search.history.space.techniques.describe(left, search.history.space.baseline)
    failed = [trial.outcome for trial in search.history.searched if not trial.outcome.ok]
    if all(o.kind is Kind.UNSUPPORTED or search.history.objective.does_not_fit(o) for o in failed):
        left_over = f"the next to try ({named}) may fit"
    else:  # some failed for other reasons, which say nothing of what fits
        left_over = f"not all was tried (next: {named})"
    return f"{left_over}: the same command with a larger --budget, or more --trials, goes on with it"


def what_would_fit(search: Search) -> str:
    """What to fix instead, and whether the baseline fits: where the user's `--fix` leaves nothing."""
    history, fixed = search.history, search.history.space.fixed
    hints = [
        f"{name}={choice} is predicted to fit"
        for name in fixed
        if (choice := next(_fitting(search, name), None)) is not None
    ]
    if history.baseline is not None and history.objective.feasible(history.baseline):
        baseline = history.space.baseline
        hints.append(
            f"the baseline (batch {baseline.batch_size} x{baseline.accumulation_steps}) fits, but is not what was fixed"
        )
    return "; ".join(hints)


def _fitting(search: Search, name: str) -> Iterator[Choice]:
    """Choices of a fixed key with which some config is likely to fit; the largest batch size first."""
    inspection, space = search.inspection, search.history.space
    if name == BATCH_SIZE:
        choices: list[Choice] = [size for size in reversed(inspection.batch.sizes) if size < int(space.fixed[name])]
    elif name in space.techniques:
        choices = [choice for choice in inspection.support_of(name).choices if choice != space.fixed[name]]
    else:
        choices = []
    kept = [config for config in space.tracing() if space.answers(config)]
    for choice in choices:
        configs = (space.complete({**config.as_dict(), name: choice}) for config in kept)
        predictions = (search.cost_model.predict(search.history, config) for config in configs)
        if any(p is not None and p.peak_bytes and p.chance_to_fit > LIKELY for p in predictions):
            yield choice
