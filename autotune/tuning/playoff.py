"""The play-off: fresh, interleaved, shuffled processes of the best few and the baseline, compared in pairs.

The search's own figures only choose who takes part: the best of many noisy figures is too good to be true.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from autotune.records.config import Config
from autotune.records.objective import MEMORY_SPEED_TOLERANCE, Objective
from autotune.records.outcome import Outcome
from autotune.records.result import Dropped, Measured
from autotune.records.rounds import round_effects
from autotune.study.figures import measured, ratio_interval

MIN_ROUNDS = 3
MAX_ROUNDS = 12
DECIDED = 0.01  # half-width of the gain's interval at which more rounds tell nothing new
LOST = 0.99  # confidence at which a loser is dropped: it is looked at after every round
CLOSE = 0.02  # a tie is only between configs this close, however wide the interval


@dataclass
class Entrant:
    """One config in the play-off; `outcomes` by round."""

    config: Config
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    dropped: str = ""  # why it is out
    failed: bool = False  # out because it did not run through within the memory, not because others are better

    @property
    def peak_bytes(self) -> int:
        """The highest peak of its processes."""
        return self.measured().peak_bytes

    def measured(self) -> Measured:
        """The throughput over its fresh processes, with the interval between them."""
        return measured(self.config, self.outcomes.values())

    def finalist(self) -> Measured:
        """The entrant's figures, with the reason if it failed."""
        if not self.failed:
            return self.measured()
        if any(outcome.measurement for outcome in self.outcomes.values()):
            return Dropped(**vars(self.measured()), dropped=self.dropped)
        return Dropped(
            config=self.config.as_dict(),
            samples_per_s=0.0,
            samples_per_s_ci=(0.0, 0.0),
            peak_bytes=0,
            step_s=0.0,
            num_processes=0,
            dropped=self.dropped,
        )


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How the play-off ended.

    Attributes:
        answer: the entrant to recommend; None when every entrant failed.
        baseline: None when it did not run, in the search or here.
        gain: merit of the answer over the baseline's, with its 95 % interval; None without a baseline that runs.
        speedup: the same for the throughput, which is the merit where the objective is `throughput`.
    """

    answer: Entrant | None
    baseline: Entrant | None
    gain: tuple[float, float, float] | None
    speedup: tuple[float, float, float] | None
    entrants: tuple[Entrant, ...]
    num_rounds: int


def paired_ratio(
    a: Entrant, b: Entrant, merit: Callable[[Outcome], float], confidence: float = 0.95
) -> tuple[float, float, float] | None:
    """Merit of `a` over `b` from the rounds that both finished, with its interval; None when there is no such round."""
    rounds = [
        number
        for number, outcome in a.outcomes.items()
        if outcome.ok and number in b.outcomes and b.outcomes[number].ok
    ]
    if not rounds:
        return None
    return ratio_interval([math.log(merit(a.outcomes[n]) / merit(b.outcomes[n])) for n in rounds], confidence)


def play_off(
    candidates: Iterable[Config],
    baseline: Config | None,
    *,
    run: Callable[[Config, int], Outcome | None],
    objective: Objective,
    has_time: Callable[[float, int], bool],
    seed: int,
    substitutes: Iterable[Config] = (),
) -> Standing | None:
    """Run rounds until the answer and its gain are known, or time is up.

    None if the first round was not completed: entrants that had not run by then would look like failures.

    Args:
        candidates: the best few, best first.
        baseline: the user's baseline; None when it does not run.
        run: runs a config in a fresh process for a round; None when the user interrupts or the time is up.
        has_time: whether there is time for a round of that many seconds, given the number of rounds already done. If all
            who ran have failed and somebody is left, one more round is played anyway: else there is no answer.
        substitutes: best first; one replaces each candidate that fails, or a baseline that failed alone.
    """
    order, waiting = random.Random(seed), iter(substitutes)
    base = Entrant(baseline) if baseline is not None else None
    entrants = [Entrant(config) for config in candidates if config != baseline]
    round_s, number = 0.0, 0
    while number < MAX_ROUNDS and (has_time(round_s, number) or _is_open(_everyone(entrants, base))):
        playing = [entrant for entrant in _everyone(entrants, base) if not entrant.dropped]
        order.shuffle(playing)
        round_s = 0.0
        for entrant in playing:
            outcome = run(entrant.config, number)
            if outcome is None:
                return _standing(entrants, base, objective, number) if number else None
            round_s += outcome.wall_s
            entrant.outcomes[number] = outcome
            if not outcome.ok or objective.beyond_memory(outcome):
                entrant.dropped, entrant.failed = failure(outcome), True
                alone = not entrants  # a baseline that nothing comes near, and that yet fails, leaves no answer
                if (entrant is not base or alone) and (substitute := next(waiting, None)) is not None:
                    entrants.append(Entrant(substitute))
        number += 1
        played = [entrant for entrant in entrants if entrant.outcomes]
        if number >= MIN_ROUNDS and _settle(played, base, objective) and played == entrants:
            break
    return _standing(entrants, base, objective, number) if number else None


def _is_open(everyone: Iterable[Entrant]) -> bool:
    """Whether all who ran have failed, and somebody has yet to run."""
    left = [bool(entrant.outcomes) for entrant in everyone if not entrant.dropped]
    return bool(left) and not any(left)


def failure(outcome: Outcome) -> str:
    """Why a config with this outcome may not be recommended: it failed, or needs too much memory."""
    if outcome.ok:
        return "it needs more than the memory limit less headroom"
    return ": ".join(filter(None, (str(outcome.kind), outcome.cause)))


def _settle(entrants: list[Entrant], base: Entrant | None, objective: Objective) -> bool:
    """Drop the entrants that have lost. True when the rest is decided."""
    if objective.name == "memory" and base is not None and not base.dropped:
        for entrant in entrants:  # in pairs, since the whole machine may have become slower since the search
            speed = paired_ratio(entrant, base, samples_per_s)
            if not entrant.dropped and speed is not None and speed[0] < MEMORY_SPEED_TOLERANCE:
                entrant.dropped = "slower than the baseline"
    remaining = [entrant for entrant in entrants if not entrant.dropped]
    if not remaining:
        return True
    leader = _leader(remaining, _levels(_everyone(entrants, base), objective))
    for entrant in remaining:
        against_leader = paired_ratio(entrant, leader, objective.merit, LOST)
        if entrant is not leader and against_leader is not None and against_leader[2] < 1:
            entrant.dropped = "slower" if objective.name == "throughput" else "worse"
    alone = sum(not entrant.dropped for entrant in remaining) == 1
    if base is None or base.dropped:
        return alone
    gain = paired_ratio(leader, base, objective.merit)
    return alone and gain is not None and (gain[2] - gain[1]) / 2 / gain[0] <= DECIDED


def _everyone(entrants: Sequence[Entrant], base: Entrant | None) -> list[Entrant]:
    return [*entrants, *([base] if base is not None else [])]


def _levels(everyone: Sequence[Entrant], objective: Objective) -> dict[Config, float]:
    """Log merit of each entrant, corrected for how fast each round was as a whole: not all ran in the same rounds."""
    logs = {
        entrant.config: {n: math.log(objective.merit(outcome)) for n, outcome in entrant.outcomes.items() if outcome.ok}
        for entrant in everyone
    }
    effects = round_effects(logs)
    return {
        config: fmean(value - effects[n] for n, value in values.items()) for config, values in logs.items() if values
    }


def _leader(entrants: Sequence[Entrant], levels: Mapping[Config, float]) -> Entrant:
    return max(entrants, key=lambda entrant: levels[entrant.config])


def _standing(entrants: list[Entrant], base: Entrant | None, objective: Objective, rounds: int) -> Standing:
    """Choose the answer: on a tie less memory, then fewer techniques. It is the baseline unless one beats it beyond the noise."""
    _settle([entrant for entrant in entrants if entrant.outcomes], base, objective)
    remaining = [entrant for entrant in entrants if not entrant.dropped and entrant.outcomes]
    everyone = _everyone(entrants, base)
    base = base if base is not None and base.outcomes and not base.dropped else None
    levels = _levels(everyone, objective)
    answer = _choose(remaining, base, objective, levels) if remaining else None
    gain = speedup = None
    if base is not None:
        if answer is not None:
            gain, speedup = paired_ratio(answer, base, objective.merit), paired_ratio(answer, base, samples_per_s)
        if gain is None or gain[1] <= 1:
            answer, gain, speedup = base, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0)
    return Standing(
        answer=answer,
        baseline=base,
        gain=gain,
        speedup=speedup,
        entrants=tuple(entrants),
        num_rounds=rounds,
    )


def _choose(
    entrants: Sequence[Entrant], base: Entrant | None, objective: Objective, levels: Mapping[Config, float]
) -> Entrant:
    """The best entrant, or the cheapest of those as good. A proven gain over the baseline is never traded for an unproven one."""

    def proven(entrant: Entrant) -> bool:
        against_base = None if base is None else paired_ratio(entrant, base, objective.merit)
        return base is None or (against_base is not None and against_base[1] > 1)

    sure = [entrant for entrant in entrants if proven(entrant)]
    best = _leader(sure or entrants, levels)

    def as_good(entrant: Entrant) -> bool:
        against_best = paired_ratio(entrant, best, objective.merit)
        return against_best is not None and against_best[0] > 1 - CLOSE

    def cost(entrant: Entrant) -> tuple[int, int]:
        peak_step = round(math.log(entrant.peak_bytes) / math.log(1 + CLOSE))
        return peak_step, len(entrant.config.differences(base.config)) if base else 0

    return min([best, *filter(as_good, sure)], key=cost)


def samples_per_s(outcome: Outcome) -> float:
    """The throughput of an outcome that is `ok`."""
    assert outcome.measurement is not None
    return outcome.measurement.samples_per_s
