"""From a finished loop to a recommendation: checks, play-off, evidence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from statistics import median

from autotune.errors import AutotuneError
from autotune.records.config import Choice, Config
from autotune.records.inspection import Inspection
from autotune.records.outcome import Outcome
from autotune.records.result import Check, Measured, Result
from autotune.runners.local import ProcessProber
from autotune.tuning import why
from autotune.tuning.events import Listener, Note
from autotune.tuning.exactness import Exactness, to_compare
from autotune.tuning.loop import Loop
from autotune.tuning.playoff import Standing, failure
from autotune.units import format_bytes

FEW_ROUNDS = 2  # of the play-off
BATCH_RULES = (
    "the answer takes {new} samples per optimizer step where the baseline takes {old}: scale the learning rate by {linear:.3g} "
    "(linear rule, SGD) or {root:.3g} (square-root rule, Adam), or keep the global batch with --global-batch {old}"
)


class NothingFeasible(AutotuneError):
    """No config ran within the limits. Exit code 1."""


class Interrupted(AutotuneError):
    """The user interrupted the search; `result` is the best so far, or None. Exit code 130."""

    def __init__(self, result: Result | None) -> None:
        super().__init__("interrupted; the study is kept and the same command goes on with it")
        self.result = result


class Recommender:
    """Runs a loop to its end, checks what it found, and puts the recommendation together."""

    def __init__(
        self,
        loop: Loop,
        prober: ProcessProber,
        inspection: Inspection,
        listener: Listener,
        warnings: list[str],
        interrupted: Callable[[], bool],
    ) -> None:
        self.loop = loop
        self.exactness = Exactness(loop, prober, inspection)
        self.inspection = inspection
        self.listener = listener
        self.warnings = warnings
        self.interrupted = interrupted

    def answer(self) -> Result:
        """Run the loop, the checks and the play-off, and put the result together.

        Raises:
            NothingFeasible: no config ran within the limits.
            Interrupted: by the user; carries the best so far.
        """
        loop = self.loop
        standing: Standing | None = None
        killed = False
        try:
            standing = self._run()
            result = self._result(standing)
        except KeyboardInterrupt:  # the second one: the running probe is killed
            killed = True
            result = self._result(None)
        if result is not None and (result.confirmed or not self._confirmed_before()):
            loop.store.set_attribute("result", result.to_dict())
            loop.store.set_attribute("warnings", list(result.warnings))
        if killed or self.interrupted():
            raise Interrupted(result)
        assert result is not None
        return result

    def _run(self) -> Standing | None:
        """Loop, checks and play-off; None when no round of it was completed: by the user's wish, or for want of time."""
        loop = self.loop
        for name, choice, reason in self.exactness.known_failures():
            self._leave_out(name, choice, reason)
        loop.measure_baseline(given=self.inspection.baseline_given)
        while (
            True
        ):  # until one of the best is confirmed: where all of them fail, the search goes on with what that teaches
            loop.explore()
            loop.undo_changes()
            while self._drop_inexact():
                loop.undo_changes()
            if self.interrupted():
                return None
            if loop.best is None:
                raise NothingFeasible(self._why_none())
            standing = loop.run_play_off(self._may_come_in)
            if standing is None:
                break
            if standing.answer is not None:
                return standing
        if self.interrupted():
            return None
        if loop.best is None:
            raise NothingFeasible(self._why_none())
        self.warn(
            "no round of the play-off fitted into the time, so the answer is not confirmed; give a larger --budget"
        )
        return None

    def _why_none(self) -> str:
        loop = self.loop
        if loop.failed_again:
            return why.none_again(loop.failed_again, loop.space.baseline, loop.objective)
        return why.no_fit(loop.probed(), loop.objective.memory_limit_bytes)

    def _leave_out(self, name: str, choice: Choice, reason: str) -> None:
        self.loop.drop(name, choice)
        self.warn(f"{name}={choice} is left out: {reason}")

    def _drop_inexact(self) -> bool:
        """Take every exact technique of the finalists out of the space that is not exact on this model; whether there was one."""
        dropped = False
        for config in self.loop.finalists():
            for name, choice in to_compare(config, self.loop.space.baseline):
                if self.interrupted():
                    return dropped
                found = self.exactness.of(name, choice)
                if found.exact is False and choice in self.loop.space.choices[name]:
                    self._leave_out(name, choice, found.reason)
                    dropped = True
        return dropped

    def _may_come_in(self, config: Config) -> bool:
        """Whether a config may come in for a finalist that failed: each of its exact techniques is exact on this model.

        A finalist is taken, with a warning, where that cannot be told; what only comes in for one is not.
        """
        for name, choice in to_compare(config, self.loop.space.baseline):
            found = self.exactness.of(name, choice)
            if found.exact is False and choice in self.loop.space.choices[name]:
                self._leave_out(name, choice, found.reason)
            if not found.exact or self.interrupted():
                return False
        return True

    def _confirmed_before(self) -> bool:
        """Whether the study holds an answer that a play-off confirmed: one that none has confirmed does not replace it."""
        return bool(self.loop.store.attributes().get("result", {}).get("confirmed"))

    def warn(self, text: str) -> None:
        """Tell the user, now and with the answer; what was said is not said again."""
        if text not in self.warnings:
            self.warnings.append(text)
            self.listener.on(Note(text=text, warning=True))

    def _result(self, standing: Standing | None) -> Result | None:
        loop = self.loop
        probed = loop.probed()
        confirmed = standing.answer if standing is not None else None
        if confirmed is not None:
            answer, measured = confirmed.config, confirmed.measured()
        elif loop.best is not None and loop.best[1].measurement is not None:
            answer, measured = loop.best[0], why.measured_once(loop.best[0], loop.best[1].measurement)
        else:
            return None
        baseline, speedup = self._baseline(standing, measured)
        verdict = "faster" if baseline is None else "same"
        if speedup is not None and answer != loop.space.baseline:
            verdict = "faster" if speedup[1] > 1 else "slower" if speedup[2] < 1 else "same"
        checks = self._checks(answer) if standing is not None else ()
        if baseline is None:
            self.warn(f"there is no speed-up to state, since the baseline did not run: {self._baseline_failure()}")
        if confirmed is None and self._confirmed_before():
            self.warn("the study keeps its earlier answer, which a play-off confirmed; `autotune show` shows it")
        self._warn_of_what_was_not_compared(answer)
        outcomes = confirmed.outcomes.values() if confirmed else [loop.best[1]] if loop.best else []
        self._collect_warnings(answer, outcomes)
        if standing is not None and 0 < standing.num_rounds <= FEW_ROUNDS:
            self.warn(
                f"only {standing.num_rounds} round(s) of the play-off fitted into the budget; "
                "a larger --budget gives a surer answer"
            )
        of_answer = [outcome for config, outcome in loop.known() if config == answer and outcome.measurement]
        found = of_answer[-1].measurement if of_answer else None
        played = [entrant for entrant in (standing.entrants if standing else ()) if entrant.outcomes]
        ran = [entrant.measured() for entrant in played if not entrant.failed]
        ran += [standing.baseline.measured()] if standing is not None and standing.baseline is not None else []
        all_probes = loop.store.probed()
        known = why.figures(all_probes, ran)
        return Result(
            config=answer.as_dict(),
            samples_per_s=measured.samples_per_s,
            samples_per_s_ci=measured.samples_per_s_ci,
            peak_bytes=measured.peak_bytes,
            memory_limit_bytes=loop.objective.memory_limit_bytes,
            headroom=loop.objective.headroom,
            baseline=baseline,
            speedup=speedup[0] if speedup else None,
            speedup_ci=(speedup[1], speedup[2]) if speedup else None,
            verdict=verdict,
            objective=loop.objective.name,
            confirmed=confirmed is not None,
            finalists=tuple(entrant.finalist() for entrant in played),
            front=why.front(known),
            effects=why.effects(answer, loop.space.baseline, why.figures(probed, ())),
            checks=checks,
            limit=why.limiting(answer, found, probed, loop.objective) if found else "",
            outcomes=dict(Counter(str(probe.outcome.kind) for probe in all_probes)),
            probes=len(all_probes),
            wall_s=loop.elapsed_s,
            train_s=sum(_train_s(probe.outcome) for probe in all_probes),
            storage=loop.store.place.storage,
            study=loop.store.place.study,
            device=self.inspection.device.name,
            asked=loop.store.attributes().get("asked", {}),
            warnings=tuple(dict.fromkeys(self.warnings)),
        )

    def _baseline(
        self, standing: Standing | None, answer: Measured
    ) -> tuple[Measured | None, tuple[float, float, float] | None]:
        """The baseline's figures and the answer's throughput over them: from the play-off, else from the search's own probes."""
        if standing is not None and standing.baseline is not None:
            return standing.baseline.measured(), standing.speedup
        found = self.loop.baseline.measurement if self.loop.baseline else None
        if (
            standing is not None
            or found is None
            or self.loop.space.baseline in self.loop.failed_again
            or self.loop.baseline is None
            or not self.loop.objective.feasible(self.loop.baseline)
        ):
            return None, None
        measured = why.measured_once(self.loop.space.baseline, found)
        low, high = answer.samples_per_s_ci
        ratio = answer.samples_per_s / found.samples_per_s
        return measured, (ratio, low / found.samples_per_s_high, high / found.samples_per_s_low)

    def _baseline_failure(self) -> str:
        """Why there are no figures of the baseline."""
        again = self.loop.failed_again.get(self.loop.space.baseline)
        if again is not None:
            return f"in the play-off, {failure(again)}"
        return failure(self.loop.baseline) if self.loop.baseline is not None else "it was not measured"

    def _checks(self, answer: Config) -> tuple[Check, ...]:
        """Checks G, B and N of the answer on the user's own model, at a small batch."""
        if self.interrupted():
            return ()
        check = self.exactness.check(answer, self.loop.settings.timeout_s)
        if isinstance(check, Outcome):
            self.warn(f"the answer's gradients could not be compared with plain fp32 ({check.kind}: {check.cause})")
            return ()
        if not check.passed:
            self.warn(f"the answer's gradients differ from plain fp32: {check.reason}")
        return (check,)

    def _collect_warnings(self, answer: Config, outcomes: Iterable[Outcome]) -> None:
        outcomes = list(outcomes)
        if not self.inspection.baseline_given:
            self.warn(
                f"the model file states no BASELINE, so plain fp32 with batch {self.loop.space.baseline.batch_size} was taken "
                "for what you run today; state yours for a gain that means something"
            )
        old, new = self.loop.space.baseline.samples_per_step, answer.samples_per_step
        if self.inspection.global_batch is None and new != old:
            self.warn(BATCH_RULES.format(new=new, old=old, linear=new / old, root=(new / old) ** 0.5))
        for name in answer.differences(self.loop.space.baseline):
            if note := self.inspection.support[name].note:
                self.warn(f"{name}: {note}")
        growths = [o.measurement.growth_bytes_per_step for o in outcomes if o.measurement]
        growth = median(growths) if growths else 0.0  # an allocator's unrest may look like a leak in one process
        if growth > 0:
            self.warn(
                f"memory grows by {format_bytes(growth)} ({growth:.0f} bytes) per optimizer step: the training code keeps "
                "something from every step (a list of losses with their graphs, say), and a long run will run out of memory"
            )
        if any(o.measurement and o.measurement.disturbances for o in outcomes):
            self.warn("other work disturbed the machine during the play-off; a quiet machine gives narrower intervals")

    def _warn_of_what_was_not_compared(self, answer: Config) -> None:
        for name, choice in to_compare(answer, self.loop.space.baseline):
            found = self.exactness.not_compared(name, choice)
            if found is not None:
                self.warn(
                    f"{name}={choice} was not compared with plain fp32, so it may not be exact on this model: "
                    f"{found.reason}; {found.remedy}"
                )


def _train_s(outcome: Outcome) -> float:
    return outcome.measurement.train_s if outcome.measurement else outcome.train_s
