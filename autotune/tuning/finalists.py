"""Which configs take part in the play-off, which come in later, and how much time a search leaves for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence

from autotune.records.config import Config
from autotune.records.objective import Objective
from autotune.records.outcome import Outcome
from autotune.tuning.evidence import Searched

MOST = 3
SURE_TO_FIT = 0.97  # of the usable memory: peaks of single processes differ by a few per cent
SAFE = 0.9  # of it: who comes in for one that failed must not fail likewise
NEAR_BEST = 0.93  # single processes differ by this much on a busy machine; who is this near the best may be the best
AS_GOOD = 0.98  # of the best's merit: one process of each cannot tell them apart
WANTED_ROUNDS = 5  # processes differ more than blocks within one, so many short rounds beat a few long ones
FEWEST_ROUNDS = 2  # without a second round there is no interval between processes
LEAST_ROUND = 3  # processes: of the baseline, of the best so far and of who comes in
MAX_SHARE = 0.4  # of the time that exploring and play-off share
MAY_WIN = 0.1  # chance to beat the leader that is worth a place
MAY_WIN_Z = 1.2816  # standard deviations below it that leave this chance
BETTER = math.log(1.01)


def near_the_best(ranked: Mapping[Config, Outcome], objective: Objective) -> list[Config]:
    """The feasible configs that may be the best, best first. Those that surely fit come before those that only just fitted.

    Each group is compared with its own best. So safe configs play however fast a config is that only just fitted.
    """
    sure = {config: outcome for config, outcome in ranked.items() if _fits_within(SURE_TO_FIT, outcome, objective)}
    near: list[Config] = []
    for group in (sure, {config: outcome for config, outcome in ranked.items() if config not in sure}):
        merits = {config: objective.merit(outcome) for config, outcome in group.items()}
        best = max(merits.values(), default=0.0)
        near += [config for config, merit in merits.items() if merit >= NEAR_BEST * best]
    return near


def with_the_simplest(near: Mapping[Config, float], num: int, num_changes: Callable[[Config], int]) -> list[Config]:
    """As many of the configs near the best as can play: the best, then the one of fewest changes, then the others by rank.

    They are within the noise of each other, so a technique more has to show in the play-off what it is for. Where one alone
    can play, it is the one of fewest changes among those that are as good as the best.

    Args:
        near: each with its merit, best first.
        num_changes: techniques that a config switches otherwise than the baseline.
    """
    best = next(iter(near))
    among = near if num > 1 else [config for config, merit in near.items() if merit >= AS_GOOD * near[best]]
    simplest = min(among, key=num_changes)
    return list(dict.fromkeys((best, simplest, *near)))[:num] if num > 1 else [simplest]


def chosen(config: Config, others: Sequence[Config], num: int, merits: Mapping[Config, float]) -> Searched | None:
    """What the search found of one of `num` finalists; None where its own figure is not what it was chosen for."""
    log, rivals = math.log(merits[config]), sorted((math.log(merits[other]) for other in others), reverse=True)
    bars = [*(best + math.log(NEAR_BEST) for best in rivals[:1]), *rivals[num - 1 : num]]
    bar = max(bars, default=None)
    return Searched(log, bar) if bar is None or log >= bar else None


def may_win(log: float, best_log: float, std: float) -> Searched | None:
    """What the search found of a config that may yet beat the best, where one process differs from another by `std`."""
    bar = best_log + BETTER - MAY_WIN_Z * std * math.sqrt(2)
    return Searched(log, bar) if log >= bar else None


def substitutes(ranked: Mapping[Config, Outcome], objective: Objective, taken: Container[Config]) -> list[Config]:
    """The configs that may replace a finalist that fails: the best that surely fit, however slow."""
    return [
        config for config, outcome in ranked.items() if config not in taken and _fits_within(SAFE, outcome, objective)
    ]


def _fits_within(share: float, outcome: Outcome, objective: Objective) -> bool:
    """Whether another process of a config will fit as well, if this one did."""
    measured = outcome.measurement
    return measured is None or measured.peak_bytes <= share * objective.usable_bytes


def affordable(left_s: float, probe_s: float) -> int:
    """How many finalists the remaining time can confirm beside the baseline, at `probe_s` per process.

    At least two where there is any time: a single one may have been lucky, or may not fit a second time.
    """
    wanted, fewest = (int(left_s / (rounds * probe_s)) - 1 for rounds in (WANTED_ROUNDS, FEWEST_ROUNDS))
    return max(1, min(2, fewest), min(MOST, wanted))


def time_to_leave(probe_s: float, shared_s: float) -> float:
    """Seconds of the shared time that exploring leaves for the play-off: the rounds wanted, up to a share.

    At least a round with whoever is found last: who cannot play any more is found in vain.
    """
    return max(LEAST_ROUND * probe_s, min(WANTED_ROUNDS * (MOST + 1) * probe_s, MAX_SHARE * shared_s))
