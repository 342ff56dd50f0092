"""Whether a baseline is kept for want of evidence: what was tried, what was not, and what would decide it."""

from __future__ import annotations

import math

from autotune.records.result import Rival
from autotune.tuning.entrant import Standing
from autotune.tuning.state import Search
from autotune.units import format_exact_seconds, plural

MAY_BE_FASTER = 1.05  # an interval that reaches above leaves open whether a gain was missed
DECIDING_WIDTH = 0.1  # of the gain's interval
MOST_BUDGETS = 10  # a budget so many times larger is not proposed
ROUNDED_S = 30.0
NAMED = 6  # choices that were not tried


def open_question(search: Search, standing: Standing | None, rival: Rival | None) -> str:
    """Why the evidence is too thin to say that nothing beats the baseline; empty where it is not."""
    history, budget = search.history, search.budget
    may_be_faster = rival is not None and rival.speedup_ci[1] > MAY_BE_FASTER
    left = [switch for switch, _ in search.untried().left(history)]
    if not may_be_faster and not left:
        return ""
    tried = {config for config, outcome in history.known.items() if outcome.ok} - {history.space.baseline}
    said = [f"{plural(len(tried), 'config') if tried else 'nothing'} ran beside the baseline"]
    if left:
        names = ", ".join(f"{name}={choice}" for name, choice in left[:NAMED])
        said.append(f"never run: {names}" + (f" and {len(left) - NAMED} more" if len(left) > NAMED else ""))
    needed_s = budget.elapsed_s + len(left) * budget.expected_probe_s(history)
    if standing is not None and rival is not None and may_be_faster:
        pair_s = sum(entrant.wall_s for entrant in (standing.baseline, standing.candidate) if entrant is not None)
        low, high = rival.speedup_ci
        rounds = standing.num_rounds * (((high - low) / rival.speedup / DECIDING_WIDTH) ** 2 - 1)
        needed_s += max(0.0, rounds) * pair_s
    if budget.num_trials is not None and left and budget.elapsed_s < budget.budget_s / 2:
        said.append(f"more than --trials {budget.num_trials} would do")
    elif needed_s > MOST_BUDGETS * budget.budget_s:
        said.append("processes differ too much here for any budget: try on a quieter machine")
    else:
        would_do_s = ROUNDED_S * math.ceil(max(needed_s, budget.budget_s + 1) / ROUNDED_S)
        said.append(f"--budget {format_exact_seconds(would_do_s)} would do")
    return "; ".join(said)
