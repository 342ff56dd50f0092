"""Runs the play-off: measures the best few configs and the baseline again in fresh processes."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from autotune.records.config import Config
from autotune.records.outcome import Outcome
from autotune.records.trial import PLAY_OFF, Proposal
from autotune.tuning import finalists
from autotune.tuning.playoff import Standing, play_off
from autotune.tuning.state import Search
from autotune.units import plural

PLAY_OFF_INTERVAL = 0.01
PLAY_OFF_MIN_TIMED_S = 0.5


def finalists_of(search: Search) -> list[Config]:
    """The best few configs, ranked by all probes together: as many as the remaining time can confirm."""
    history, budget = search.history, search.budget
    near = finalists.near_the_best(_ranked(search), history.objective)
    others = [config for config in near if config != history.space.baseline]
    if not others:
        return []
    return others[: finalists.affordable(budget.budget_s - budget.elapsed_s, median(history.probe_wall_s))]


def confirm(search: Search, admit: Callable[[Config], bool] = lambda config: True) -> Standing | None:
    """Run the play-off of the best few and the baseline; None when no round was completed.

    Args:
        admit: whether a config may replace a finalist that failed.
    """
    history, budget = search.history, search.budget
    settings = budget.paced(search.settings, history)
    settings = settings.replace(
        interval=PLAY_OFF_INTERVAL,
        slowest_samples_per_s=0.0,
        max_timed_s=max(PLAY_OFF_MIN_TIMED_S, settings.max_timed_s / 2),
    )
    playing = finalists_of(search)
    if playing:
        search.tell(f"play-off: {plural(len(playing), 'config')} and the baseline, in fresh processes")

    def run(config: Config, number: int) -> Outcome | None:
        trial = None
        while trial is None and not search.interrupted() and budget.left_s > 0:  # once more after a fault
            proposal = Proposal(config=config, stage=PLAY_OFF, reason=f"round {number + 1}", round=number)
            trial = search.probe(proposal, settings)
        return trial.outcome if trial is not None else None

    baseline, outcome = history.space.baseline, history.baseline
    runs = outcome is not None and history.objective.feasible(outcome) and baseline not in history.failed_again
    waiting = finalists.substitutes(_ranked(search), history.objective, (*playing, baseline))
    return play_off(
        playing,
        baseline if runs else None,
        run=run,
        objective=history.objective,
        has_time=lambda round_s, number: finalists.may_play(number, budget.elapsed_s + round_s, budget.budget_s),
        seed=search.options.seed,
        substitutes=filter(admit, waiting),  # asked one by one, when its turn comes
    )


def _ranked(search: Search) -> dict[Config, Outcome]:
    """The feasible configs, ranked best first by all probes together."""
    feasible = search.history.feasible
    return {config: feasible[config] for config in search.cost_model.ranked(search.history)}
