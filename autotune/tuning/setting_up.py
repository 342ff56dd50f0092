"""When a search tries choices that compile without being asked to: where its budget pays for the long time before the first step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from autotune.records.inspection import Inspection, Support
from autotune.units import format_seconds

SHARE = 0.1  # of the budget, that one config may be expected to take before its first step
MOST_GAIN = 0.25  # of the time of a training, which such a choice is taken to win back at the most


def drop_slow_setups(
    inspection: Inspection, budget_s: float, train_samples: float | None, included: Collection[str]
) -> Inspection:
    """The inspection with optional choices among the usual ones where only their price had made them optional, and it is low.

    Args:
        budget_s: seconds that the search has.
        train_samples: that the training is to take; None where that is not known.
        included: techniques that the user has asked for anyway.
    """
    allowed_s, unless = SHARE * budget_s, "a --budget of {} or more does so by itself"
    if train_samples is not None and inspection.sample_s is not None:
        won_s = MOST_GAIN * train_samples * inspection.sample_s
        if won_s < allowed_s:
            allowed_s, unless = won_s, "the training is too short to win that back"
    support = {
        name: _judge(name, found, allowed_s, unless) if found.setup_s and name not in included else found
        for name, found in inspection.support.items()
    }
    return replace(inspection, support=support)


def _judge(name: str, support: Support, allowed_s: float, unless: str) -> Support:
    cheap = [choice for choice, seconds in support.setup_s if seconds <= allowed_s]
    dear_s = [seconds for _, seconds in support.setup_s if seconds > allowed_s]
    reason = support.reason
    if dear_s:
        remedy = unless.format(format_seconds(min(dear_s) / SHARE))
        reason = f"{reason}: {format_seconds(min(dear_s))} or more for a config; --include {name} tries it, {remedy}"
    return replace(
        support,
        choices=(*support.choices, *cheap),
        optional=tuple(choice for choice in support.optional if choice not in cheap),
        reason=reason,
    )
