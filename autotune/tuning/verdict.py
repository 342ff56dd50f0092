"""The verdict of an answer. It is decided here alone, so that its word, its interval and its confirmation agree."""

from __future__ import annotations

import math

from autotune.tuning.confirm import whole_rounds
from autotune.tuning.entrant import Ratio, Standing
from autotune.tuning.playoff import MIN_ROUNDS
from autotune.tuning.state import Search
from autotune.units import format_exact_seconds, plural

AS_FAST = 1.05  # an interval that reaches above leaves open whether there is a gain; one below the inverse, a loss
DECIDING_WIDTH = 0.1  # of the gain's interval, in logarithms
MOST_BUDGETS = 10  # a budget so many times larger is not proposed
ROUNDED_S = 30.0
NAMED = 6  # choices that were not tried


def verdict_of(search: Search, standing: Standing | None, speedup: Ratio | None, *, kept: bool) -> tuple[str, str]:
    """The verdict's word, and for `undecided` what is open and would decide it.

    Args:
        standing: None where the answer was not confirmed: then it is not said to be faster or slower.
        speedup: of the answer over the baseline, or of the best of the others where that is kept; None without one of them.
        kept: the answer is the baseline.
    """
    if kept:
        question = _open_question(search, standing, speedup)
        return "undecided" if question else "same", question
    if standing is None:
        said = [f"{_not_played(search)}, so its figure is from one process"]
        return "undecided", "; ".join([*said, *_would_do(search, standing, speedup, 0)])
    if speedup is None:
        return "faster", ""  # than a baseline that does not run
    _, low, high = speedup
    if low > 1 or high < 1:
        return "faster" if low > 1 else "slower", ""
    if low >= 1 / AS_FAST and high <= AS_FAST:
        return "same", ""
    said = [f"its interval holds 1 after {plural(standing.num_rounds, 'round')} of the play-off"]
    return "undecided", "; ".join([*said, *_would_do(search, standing, speedup, 0)])


def _open_question(search: Search, standing: Standing | None, speedup: Ratio | None) -> str:
    """Why the evidence is too thin to say that nothing beats the baseline; empty where it is not."""
    history = search.history
    left = [switch for switch, _ in search.untried().left(history)]
    tried = {config for config, outcome in history.known.items() if outcome.ok} - {history.space.baseline}
    may_be_faster = speedup is not None and speedup[2] > AS_FAST
    not_played = standing is None and any(config in history.feasible for config in tried)
    if not (may_be_faster or left or not_played):
        return ""
    said = [f"{plural(len(tried), 'config') if tried else 'nothing'} ran beside the baseline"]
    said += [_not_played(search)] if not_played else []
    if left:
        names = ", ".join(f"{name}={choice}" for name, choice in left[:NAMED])
        said.append(f"never run: {names}" + (f" and {len(left) - NAMED} more" if len(left) > NAMED else ""))
    return "; ".join([*said, *_would_do(search, standing, speedup if may_be_faster else None, len(left))])


def _not_played(search: Search) -> str:
    if whole_rounds(search):
        return "the answer took part in no round of the play-off that was completed"
    return "no round of the play-off was completed"


def _would_do(search: Search, standing: Standing | None, speedup: Ratio | None, num_left: int) -> list[str]:
    """Which budget would decide it: for the choices that were not tried, and for rounds until the interval is narrow enough."""
    budget, probe_s = search.budget, search.budget.expected_probe_s(search.history)
    if search.interrupted():
        return []
    if budget.num_trials is not None and num_left and budget.elapsed_s < budget.budget_s / 2:
        return [f"more than --trials {budget.num_trials} would do"]
    rounds_s = 0.0
    if standing is None:
        rounds_s = 2 * MIN_ROUNDS * probe_s
    elif speedup is not None:
        pair_s = sum(entrant.wall_s for entrant in (standing.baseline, standing.candidate) if entrant is not None)
        ratio, low, high = speedup
        width = max(DECIDING_WIDTH, 2 * math.log(ratio))
        more = standing.num_rounds * ((math.log(high / low) / width) ** 2 - 1)
        if standing.num_rounds < MIN_ROUNDS:  # too few to know how much processes differ
            more = min(more, MIN_ROUNDS)
        rounds_s = max(0.0, more) * pair_s
    if rounds_s > MOST_BUDGETS * budget.budget_s:
        return ["processes differ too much here for any budget: try on a quieter machine"]
    asked_s = search.options.budget_s  # of which evaluation and other rankings have their shares
    needed_s = (budget.elapsed_s + num_left * probe_s + rounds_s) * asked_s / budget.budget_s
    would_do_s = ROUNDED_S * math.ceil(max(needed_s, asked_s + 1) / ROUNDED_S)
    return [f"--budget {format_exact_seconds(would_do_s)} would do"]
