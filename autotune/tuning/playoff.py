"""The play-off: fresh, interleaved, shuffled processes of the best few and the baseline, compared within rounds.

The answer has the highest expected merit of those whose chance to be worse than the baseline by more than 1 % is below 5 %; of
several that are as good, it is the cheapest.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, geometric_mean, variance
from typing import Any

from autotune.probe.timing import MIN_BLOCKS, OVERTIME, micro_steps_per_block
from autotune.records.config import BATCH_KEYS, Config
from autotune.records.objective import Objective
from autotune.records.outcome import Kind, Measurement, Outcome
from autotune.records.study import PLAY_OFF, Trial
from autotune.study.figures import unrest
from autotune.study.history import find_excused
from autotune.tuning.entrant import Entrant, Ratio, Standing, failure, inverse, samples_per_joule, samples_per_s
from autotune.tuning.evidence import Evidence, Key, Searched
from autotune.tuning.guest import Guest
from autotune.tuning.told import tell_figures

MIN_ROUNDS = 3
MAX_ROUNDS = 50  # a machine that leaves the gain open after so many is too noisy to tell
WIDE = 0.05  # width of the gain's interval, as a share of the gain, up to which more rounds tell nothing new
SLOWER = math.log(0.99)  # an answer must not be slower than the baseline by more than this
RISK = 0.05  # the chance that is accepted for it to be so all the same
SURE = 1.6449  # standard deviations above that, which leave this chance
CONFIDENCE = 0.95
LOST = 0.01  # chance to be better than the leader, or than the baseline by `CLOSE`, below which an entrant is out
CLOSE = 0.02  # a tie is only between configs this close, however wide the interval
FOCUS = 4  # where processes differ by more than that, the leader plays up to so many times as often as the others
SHORTEST_TIMED_S = 0.5
GUEST = "the guest"  # among the configs of those who play


class PlayOff:
    """The entrants and the rounds that they have played.

    Args:
        baseline: None when the user's baseline does not run.
        run: runs a config in a fresh process for a round; returns None when the user interrupts or the time is up.
        ended: called with the number of each round that was not cut short.
        earlier: the trials of the rounds that earlier searches played.
        baseline_may_win: False where the baseline is not what the user fixed, or leaves less than the headroom free; then it plays
            only to be compared with.
        guest: is measured in the first rounds that have time for it; None for none.

    Attributes:
        left_s: returns the seconds that are left for its rounds, by which a process is timed for longer or shorter.
    """

    def __init__(
        self,
        baseline: Entrant | None,
        run: Callable[[Config, int], Outcome | None],
        objective: Objective,
        *,
        seed: int,
        ended: Callable[[int], None] = lambda number: None,
        earlier: Iterable[Trial] = (),
        baseline_may_win: bool = True,
        guest: Guest | None = None,
    ) -> None:
        self.baseline = baseline
        self.guest = guest
        self.left_s: Callable[[], float] = lambda: 0.0
        self.entrants: list[Entrant] = []
        self.objective = objective
        self._run, self._ended = run, ended
        self._order = random.Random(seed)
        self.baseline_may_win = baseline_may_win
        self._rounds: list[int] = []
        self._runs = list(earlier)
        self._first_round = 1 + max((run.round for run in self._runs if run.round is not None), default=-1)
        self._next_round = self._first_round
        self._disturbed = {run.round for run in self._runs if run.outcome.disturbances}
        self._substitutes: list[Entrant] = []

    def enter(self, entrant: Entrant) -> None:
        """Let a config play from the next round on, if it has not played yet."""
        if entrant.config not in [known.config for known in self._everyone()]:
            self.entrants.append(entrant)

    def play(
        self,
        has_time: Callable[[float, int], bool],
        *,
        substitutes: Iterable[Entrant] = (),
        challenger: Callable[[], Entrant | None] = lambda: None,
    ) -> Standing | None:
        """Play rounds until the answer and its gain are known, or time is up. The baseline never plays alone, but beside a guest.

        None if no round was completed: entrants that had not run by then would look like failures.

        Args:
            has_time: whether there is time for a round of that many seconds, given the number of rounds already done. If
                all who ran have failed and somebody is left, one more round is played anyway: else there is no answer.
            substitutes: best first; one replaces each candidate that fails.
            challenger: the next config that may still turn out better, if there is one.
        """
        waiting = iter(substitutes)
        while len(self._rounds) < MAX_ROUNDS:
            if self._rounds and (late := challenger()) is not None:
                self.enter(late)
            running = self._affordable(lambda round_s: has_time(round_s, len(self._rounds)))
            # the first round may use the overrun, a guest may not
            guests = self._guests(running, lambda round_s: has_time(round_s, max(1, len(self._rounds))))
            if not running or not (self.playing or guests) or (self._rounds and self._is_settled(running)):
                break
            if not self._play_round([*running, *guests], waiting):
                break
            self._drop_losers()
        return self._standing() if self._rounds else None

    @property
    def playing(self) -> list[Entrant]:
        """The entrants that are still in."""
        return [entrant for entrant in self.entrants if not entrant.dropped]

    @property
    def compared(self) -> list[Entrant]:
        """The entrants that are still in and can be compared by now."""
        return [entrant for entrant in self.playing if self._is_comparable(entrant)]

    @property
    def round_s(self) -> float:
        """Seconds that the next round will take."""
        return sum(entrant.wall_s for entrant in self._everyone() if not entrant.dropped)

    def evidence(
        self, figure: Callable[[Outcome], float | None] | None = None, searched: Mapping[Config, Searched] | None = None
    ) -> Evidence:
        """What the rounds say of a figure, by default the merit. A process weighs the less, the more it was disturbed.

        A process that does not know the figure counts as if it had not run.

        Args:
            searched: what the search found. By default: of the merit what it found of those who play, as far as that counts;
                of other figures nothing.
        """
        of: Callable[[Outcome], float | None] = figure or self.objective.merit
        if searched is None:
            searched = {e.config: e.searched for e in self._everyone() if e.searched is not None and figure is None}
        return self._evidence_of(
            {e.config: e.outcomes for e in self._everyone()},
            of,
            searched,
            is_speed=figure is not None or self.objective.rests_on_speed,
        )

    def over_guest(self, config: Config) -> Ratio | None:
        """The throughput of a config that plays over the guest's, with its 95 % interval; None where they ran in no common round."""
        outcomes: dict[Key, Mapping[int, Outcome]] = {e.config: e.outcomes for e in self._everyone()}
        outcomes[GUEST] = {} if self.guest is None else self.guest.ran
        if not {number for number, outcome in outcomes.get(config, {}).items() if outcome.ok} & outcomes[GUEST].keys():
            return None
        return self._evidence_of(outcomes, samples_per_s, {}, is_speed=True).difference(config, GUEST).ratio()

    @staticmethod
    def _evidence_of(
        outcomes: Mapping[Any, Mapping[int, Outcome]],
        figure: Callable[[Outcome], float | None],
        searched: Mapping[Config, Searched],
        *,
        is_speed: bool,
    ) -> Evidence:
        ran = {key: {n: o for n, o in by_round.items() if o.ok} for key, by_round in outcomes.items()}
        return Evidence(
            {
                key: {n: math.log(known) for n, o in by_round.items() if (known := figure(o))}
                for key, by_round in ran.items()
            },
            {config: found for config, found in searched.items()},  # noqa: C416 (a mapping of any key)
            {key: {n: unrest(o) for n, o in by_round.items()} for key, by_round in ran.items() if is_speed},
        )

    def leader(self, evidence: Evidence, entrants: Sequence[Entrant]) -> Entrant:
        """The entrant of the highest expected merit."""
        return max(entrants, key=self._expected_merit(evidence))

    def _expected_merit(self, evidence: Evidence) -> Callable[[Entrant], float]:
        """The expected merit of an entrant, as a logarithm: relative to the baseline's where that runs."""
        if self._base is None:
            return lambda entrant: evidence.levels[entrant.config]
        base = self._base.config
        return lambda entrant: evidence.difference(entrant.config, base).mean

    def ahead(self) -> float:
        """What the leader is expected to gain over the baseline, as a logarithm; 0 where nothing was compared with it."""
        if self._base is None:
            return 0.0
        return max(map(self._expected_merit(self.evidence()), self.compared), default=0.0)

    def stake(self, num_rounds: int) -> float:
        """What so many more rounds could gain: the expected amount, as a logarithm, by which the answer becomes better.

        It is at most the sum over those who may take the leader's place. Where the leader is not yet sure enough to be the answer,
        it is that it becomes so.
        """
        evidence, compared = self.evidence(), self.compared
        if not compared:
            return math.inf
        leader = self.leader(evidence, compared)
        if len(leader.outcomes) < MIN_ROUNDS - 1:  # it came in late, and is not the answer before it has run again
            return math.inf

        def gained(entrant: Entrant, over: Entrant, **told: float) -> float:
            share = evidence.share_of_rounds(entrant.config, over.config, num_rounds)
            return evidence.difference(entrant.config, over.config).upside_seen(share, **told)

        stake = sum(gained(entrant, leader) for entrant in compared if entrant is not leader)
        if (rival := self._rival) is None:
            return stake
        if evidence.difference(leader.config, rival.config).chance_below(SLOWER) < RISK:
            return stake + gained(rival, leader)
        return stake + gained(leader, rival, least=SLOWER, doubts=SURE)

    def timed_s(self, longest_s: float, *, same_samples: bool = False) -> float:
        """Seconds to time a process for, so that the answer becomes as sure as it can for its cost.

        Short where processes differ, long where blocks within one do: the square root of overhead times the variance
        within over that between (Kalibera and Jones, Rigorous benchmarking in reasonable time, ISMM 2013, section 5). In the first
        rounds the search's probes tell the variance within, and equal processes are taken to differ as before any were seen.

        Args:
            same_samples: whether all processes of a round time the same samples. Blocks then differ in the same way in all of them,
                for the most part: at most half of the variance between processes is taken to come from blocks.
        """
        everyone = self._everyone()
        if len(self._rounds) >= MIN_ROUNDS - 1:
            found = [outcome for entrant in everyone for outcome in entrant.outcomes.values()]
        else:
            found = [entrant.probe for entrant in everyone if entrant.probe is not None]
        timed = [(o, m) for o in found if (m := o.measurement) and len(m.block_samples_per_s) > 1 and not m.cut_short]
        if not timed:
            return min(SHORTEST_TIMED_S, longest_s)
        overhead_s = fmean(o.running_s - m.timed_s - m.explained_s - m.growth_s for o, m in timed)
        within = fmean(_block_variance(m) * m.timed_s for _, m in timed)
        all_together, mean_timed_s = self.evidence(samples_per_s).std ** 2, fmean(m.timed_s for _, m in timed)
        if same_samples:
            within = min(within, all_together * mean_timed_s / 2)
        between = max(all_together - within / mean_timed_s, 1e-3 * all_together)
        return min(max(math.sqrt(max(0.0, overhead_s) * within / between), SHORTEST_TIMED_S), longest_s)

    def affordable_timed_s(self, num_rounds: int) -> float:
        """Seconds that each process may be timed for, so that so many rounds of this search, those that were played among them, end in
        time. No round is given more than half of the time that is left: it may take longer than it is reckoned to.
        """
        playing = [entrant for entrant in self._everyone() if not entrant.dropped]
        left_s = self.left_s() - (0.0 if self.guest is None else self.guest.num_missing * self.guest.wall_s)
        round_s = left_s / max(2, num_rounds - len(self._rounds))
        return (round_s - sum(entrant.wall_s - self._timed_s(entrant) for entrant in playing)) / max(1, len(playing))

    def _timed_s(self, entrant: Entrant) -> float:
        """Seconds that the last process of an entrant was timed, or that its first one in this search will be at least."""
        last = next((o for n, o in reversed(entrant.outcomes.items()) if o.ok and n >= self._first_round), None)
        return SHORTEST_TIMED_S if last is None or last.measurement is None else last.measurement.timed_s

    def num_samples(self, timed_s: float) -> int:
        """The samples that each process of a round takes, so that one of mean speed takes `timed_s`, and the fastest no less than the
        shortest time. No process has to take more for its blocks to be enough, unless the slowest were timed far longer for that.
        """
        latest = ((one.config, one.latest()) for one in self._everyone() if not one.dropped)
        found = [(config, outcome.measurement) for config, outcome in latest if outcome and outcome.measurement]
        speeds = [measured.samples_per_s for _, measured in found]
        blocks = MIN_BLOCKS * max(_samples_per_block(config, measured) for config, measured in found)
        enough = min(blocks, OVERTIME * timed_s * min(speeds))
        return math.ceil(max(timed_s * geometric_mean(speeds), SHORTEST_TIMED_S * max(speeds), enough))

    @property
    def _base(self) -> Entrant | None:
        """The baseline, as long as it runs through."""
        return self.baseline if self.baseline is not None and not self.baseline.dropped else None

    @property
    def _rival(self) -> Entrant | None:
        """The baseline, as long as it may be the answer."""
        return self._base if self.baseline_may_win else None

    def _everyone(self) -> list[Entrant]:
        return [*self.entrants, *([self.baseline] if self.baseline is not None else [])]

    def _is_comparable(self, entrant: Entrant) -> bool:
        """Whether it ran, and in a round with the baseline where that runs: only that takes the mood of the machine out."""
        beside = entrant if self._base is None else self._base
        return not entrant.failed and bool(entrant.outcomes.keys() & beside.outcomes.keys())

    @property
    def _all_rounds(self) -> set[int]:
        """The numbers of the rounds that count, of earlier searches too. One in which every process was excused does not count."""
        played = {number for entrant in self._everyone() for number in entrant.outcomes}
        return {number for number in played if number < self._first_round or number in self._rounds}

    def _affordable(self, has_time: Callable[[float], bool]) -> list[Entrant]:
        """Who plays the next round: all whose turn it is, or as many as there is time for, the most promising beside the baseline."""
        turn = self._turn()
        if self._is_open() or has_time(sum(entrant.wall_s for entrant in turn)):
            return turn
        against = [self._base] if self._base is not None else []
        promising, others = self._by_promise()
        chosen: list[Entrant] = []
        for entrant in (*promising, *others):
            if has_time(sum(one.wall_s for one in (*against, *chosen, entrant))):
                chosen.append(entrant)
        is_worth_it = any(entrant in promising for entrant in chosen) and len(against) + len(chosen) > 1
        return [*against, *chosen] if is_worth_it else []

    def _turn(self) -> list[Entrant]:
        """Whose turn it is: everyone's who is in, or the leader's and the baseline's.

        Where processes differ by more than configs that are as good, no number of rounds that is played tells which of these is the
        best. The rounds go to the gain that is told, then. As the leader was chosen before it plays them, luck in the choice is not
        in them (two-stage selection: Cohen and Sackrowitz, Two stage conditionally unbiased estimators of the selected mean,
        Statistics and Probability Letters 8, 1989).
        """
        everyone = [entrant for entrant in self._everyone() if not entrant.dropped]
        playing, base = self.playing, self._base
        if base is None or not playing or playing != self.compared:
            return everyone
        evidence = self.evidence()
        if not evidence.differ_by_more_than(CLOSE):
            return everyone
        leader = self.leader(evidence, playing)
        if len(leader.outcomes) >= FOCUS * min(len(entrant.outcomes) for entrant in playing):
            return everyone
        return [leader, base]

    def _guests(self, running: Sequence[Entrant], has_time: Callable[[float], bool]) -> list[Guest]:
        """The guest, where it still has to run and there is time for that beside those who play the next round."""
        if self.guest is None or not self.guest.num_missing:
            return []
        round_s = sum(entrant.wall_s for entrant in running) + self.guest.wall_s
        return [self.guest] if has_time(round_s) else []

    def _by_promise(self) -> tuple[list[Entrant], list[Entrant]]:
        """Who is in, in two parts: whose round may change the answer, and the others by expected merit.

        First come those who were let in because they may win and have not played, then the leader, then substitutes.
        """
        by_merit = sorted(self.compared, key=self._expected_merit(self.evidence()), reverse=True)
        unplayed = [entrant for entrant in self.playing if entrant not in by_merit]
        late = [entrant for entrant in unplayed if entrant not in self._substitutes]
        substitutes = [entrant for entrant in unplayed if entrant in self._substitutes]
        return [*late, *by_merit[:1], *substitutes], by_merit[1:]

    def _play_round(self, running: list[Entrant | Guest], substitutes: Iterator[Entrant]) -> bool:
        """Run each of them once. False if that was cut short: of that round only the failures count.

        Whether a time-out is a failure is decided at the end of the round: it is excused where the machine stood still.
        """
        number, self._next_round = self._next_round, self._next_round + 1
        self._order.shuffle(running)
        late: list[tuple[Entrant, Trial]] = []
        whole = True
        for entrant in running:
            if isinstance(entrant, Guest):
                entrant.visit(number)
                continue
            outcome = self._run(entrant.config, number)
            if outcome is None:
                whole = False
                break
            entrant.wall_s = outcome.running_s
            run = Trial(
                number=max((run.number for run in self._runs), default=-1) + 1,
                stage=PLAY_OFF,
                config=entrant.config,
                outcome=outcome,
                feasible=outcome.ok and not self.objective.beyond_memory(outcome),
                round=number,
            )
            self._runs.append(run)
            if outcome.kind is Kind.TIMEOUT:
                late.append((entrant, run))
                continue
            if not self.objective.is_known(outcome):  # as if it had not run
                continue
            entrant.outcomes[number] = outcome
            if outcome.disturbances:
                self._disturbed.add(number)
            if entrant is self.baseline and outcome.ok:
                self.baseline_may_win &= run.feasible  # it is compared with even where it needs too much memory
            elif not run.feasible:
                self._fail(entrant, outcome, substitutes)
        passing = find_excused(self._runs)
        for entrant, run in late:
            if run.number in passing:
                self._disturbed.add(number)
            else:
                entrant.outcomes[number] = run.outcome
                self._fail(entrant, run.outcome, substitutes)
        if not whole:
            for entrant in self._everyone():
                if not entrant.failed:
                    entrant.outcomes.pop(number, None)
            return False
        self._rounds.append(number)
        self._ended(number)
        return True

    def _fail(self, entrant: Entrant, outcome: Outcome, substitutes: Iterator[Entrant]) -> None:
        """Take an entrant out; who had lost to it is in again, and a substitute comes in for a candidate."""
        entrant.failed = failure(outcome)
        for other in self.entrants:
            other.lost_to = None if other.lost_to is entrant else other.lost_to
        if entrant is not self.baseline and (substitute := next(substitutes, None)) is not None:
            self._substitutes.append(substitute)
            self.enter(substitute)

    def _is_open(self) -> bool:
        """Whether all who ran have failed, and somebody has yet to run."""
        everyone = self._everyone()
        left = [bool(entrant.outcomes) for entrant in everyone if not entrant.dropped]
        return bool(left) and not any(left) and any(entrant.failed for entrant in everyone)

    def _drop_losers(self) -> None:
        """Drop the entrants that have lost to the leader, to the baseline, or are slower than the objective allows."""
        self._drop_too_slow()
        known = [entrant for entrant in self.compared if len(entrant.outcomes) >= MIN_ROUNDS - 1]
        if not known:
            return
        evidence, rival = self.evidence(), self._rival
        leader = self.leader(evidence, known)
        for entrant in known:
            against = [] if entrant is leader else [(leader, 0.0)]
            against += [(rival, CLOSE)] if rival else []
            for other, by in against:
                if evidence.difference(entrant.config, other.config).chance_below(by) > 1 - LOST:
                    entrant.lost_to = other

    def _drop_too_slow(self) -> None:
        """Drop those below the speed that has to be kept, compared within rounds: the machine may have become slower."""
        if not (kept := self.objective.kept_speed) or (rival := self._rival) is None:
            return
        speeds = self.evidence(samples_per_s)
        for entrant in self.compared:
            lost = speeds.difference(entrant.config, rival.config).mean < math.log(kept)
            if lost and len(entrant.outcomes) >= MIN_ROUNDS - 1:
                entrant.lost_to = rival

    def _is_settled(self, running: Sequence[Entrant]) -> bool:
        """Whether more rounds would tell nothing new of those who are still in.

        Args:
            running: who would play the next round. An entrant that has neither outcomes nor time to play is not waited for.
        """
        sure = [entrant for entrant in self.compared if len(entrant.outcomes) >= MIN_ROUNDS]
        awaited = [entrant for entrant in self.playing if entrant.outcomes or entrant in running]
        num_clean = len(self._all_rounds - self._disturbed)
        too_few = num_clean < MIN_ROUNDS and len(self._all_rounds) < 2 * MIN_ROUNDS
        if not sure or sure != awaited or too_few:
            return False
        evidence = self.evidence()
        leader = self.leader(evidence, sure)
        for entrant in sure:
            if entrant is not leader:
                ahead = evidence.difference(entrant.config, leader.config)
                if 1 - ahead.chance_below(CLOSE) > RISK:
                    return False
        if self._base is None:
            return True
        gain, low, high = self._gain(evidence, leader, self._base)
        return (high - low) / gain <= WIDE

    def _gain(self, evidence: Evidence, entrant: Entrant, base: Entrant) -> Ratio:
        """What an entrant gains over the baseline. The interval holds for all who played at once (Bonferroni), so also for the best."""
        num = sum(bool(other.outcomes) and not other.failed for other in self.entrants)
        return evidence.difference(entrant.config, base.config).ratio(1 - (1 - CONFIDENCE) / max(1, num))

    def _standing(self) -> Standing | None:
        """Choose the answer, and estimate its gain and everybody's figures.

        None where the figure was not observed in any process of the baseline, or of those who ran beside it: nothing was compared.
        """
        evidence, base, objective = self.evidence(), self._base, self.objective
        speeds = evidence if objective.is_step_speed else self.evidence(samples_per_s)
        thrift = evidence if objective.is_thrift else self.evidence(samples_per_joule)
        ran = [entrant for entrant in self.entrants if self._is_comparable(entrant)]
        all_known = all(objective.is_known(run.outcome) for run in self._runs)
        if base is not None and not all_known and not (base.outcomes and (ran or not self.playing)):
            return None
        answer = candidate = self._choose(evidence, [entrant for entrant in ran if not entrant.dropped])
        if base is not None and answer is None:
            answer, candidate = self._rival, self.leader(evidence, ran) if ran else None
        figures = tell_figures(self._everyone(), base, candidate, speeds, thrift)
        gain = speedup = speedup_std = less_energy = None
        if base is not None and candidate is not None:
            own, other = figures[candidate.config], figures[base.config]
            speedup = _about(own.samples_per_s / other.samples_per_s, self._gain(speeds, candidate, base))
            speedup_std = speeds.difference(candidate.config, base.config).std
            if own.joules_per_sample and other.joules_per_sample and candidate.rounds_with(samples_per_joule, base):
                told = other.joules_per_sample / own.joules_per_sample
                less_energy = _about(told, self._gain(thrift, candidate, base))
            gain = speedup if speeds is evidence else less_energy if thrift is evidence else None
            gain = gain or self._gain(evidence, candidate, base)
        return Standing(
            answer=answer,
            baseline=base,
            candidate=candidate,
            gain=gain,
            speedup=speedup,
            speedup_std=speedup_std,
            energy=less_energy and inverse(less_energy),
            entrants=tuple(self.entrants),
            figures=figures,
            num_rounds=len(self._all_rounds),
        )

    def _choose(self, evidence: Evidence, entrants: Sequence[Entrant]) -> Entrant | None:
        """The best entrant that may be recommended, or the cheapest of those as good; None for the baseline.

        The cheapest has the fewest changes. Where memory is short, it needs the least of it. One that has run once gives way to those
        that have run in several rounds, unless it is beyond doubt clearly better than they are.
        """
        base = self._rival
        proven: Sequence[Entrant] = entrants  # a gain over the baseline; it is never traded for one that is not
        if base is not None:
            over = {entrant.config: evidence.difference(entrant.config, base.config) for entrant in entrants}
            entrants = [entrant for entrant in entrants if over[entrant.config].chance_below(SLOWER) < RISK]
            proven = [entrant for entrant in entrants if over[entrant.config].chance_below(0.0) < RISK]
        if not entrants:
            return None
        best = self.leader(evidence, entrants)
        others = proven if best in proven else entrants
        if repeated := [entrant for entrant in others if len(entrant.outcomes) >= MIN_ROUNDS - 1]:
            best_repeated = self.leader(evidence, repeated)
            if evidence.difference(best.config, best_repeated.config).chance_below(CLOSE) > RISK:
                entrants, best = repeated, best_repeated
        as_good = [e for e in entrants if evidence.levels[e.config] > evidence.levels[best.config] - CLOSE]
        if base is not None:
            if best not in proven and over[best.config].mean < CLOSE:
                as_good.append(base)
            elif best in proven:
                as_good = [entrant for entrant in as_good if entrant in proven]

        tied = [best, *as_good]
        is_short = any(self.objective.is_short_of_memory(entrant.measured().peak_bytes) for entrant in tied)

        def cost(entrant: Entrant) -> tuple[int, int, int]:
            peak_step = round(math.log(entrant.measured().peak_bytes) / math.log(1 + CLOSE))
            changes = entrant.config.differences((base or best).config).keys()
            num_techniques = len(changes - {*BATCH_KEYS})
            order = (peak_step, num_techniques) if is_short else (num_techniques, peak_step)
            return *order, len(changes)

        chosen = min(tied, key=cost)
        return None if chosen is base else chosen


def _block_variance(measured: Measurement) -> float:
    """The variance of a process's speed that its blocks tell, as a share of the speed, squared."""
    speeds = measured.block_samples_per_s
    return variance(speeds) / fmean(speeds) ** 2 / len(speeds)


def _samples_per_block(config: Config, measured: Measurement) -> int:
    """The samples of a block of a process that runs alone."""
    steps, step_s = config.accumulation_steps, measured.step_s
    return config.batch_size * micro_steps_per_block(step_s / steps, step_s, steps, by_parts=True)


def _about(told: float, found: Ratio) -> Ratio:
    """A ratio of two figures that are told, with the interval that was found for it."""
    _, low, high = found
    return told, min(low, told), max(high, told)
