"""Checks on the user's own model that configs compute the same as plain fp32: each exact technique, and the whole answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autotune import techniques
from autotune.records.batch_plan import BATCH_KEYS
from autotune.records.config import Choice, Config
from autotune.records.outcome import Kind, Outcome
from autotune.records.result import Check
from autotune.runners.runner import NotCompared, ProbeFault
from autotune.tuning.confirm import finalists_of
from autotune.tuning.state import Search
from autotune.tuning.why import OWN_STUDY

BATCH_SIZE = 4
BATCHNORM_BATCH_SIZE = 64
MIN_CHECK_S = 2.0
MIN_COMPARISON_S = 10.0
MAX_CHECK_SHARE = 0.05  # of the budget, for one check
MAX_COMPARISONS_SHARE = 0.2  # of the budget, for those before the play-off
ATTRIBUTE = "exactness"  # of the study: why a choice is not exact, empty where it is
MORE_TIME = "run the same command with a larger --budget: it continues this study and compares it"
MORE_MEMORY = f"give a larger --memory-limit, {OWN_STUDY}"
FREE_MEMORY = "end what else uses the device, and run the same command again: it continues this study and compares it"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is known about one choice of an exact technique on this model.

    Attributes:
        exact: whether it is exact; None where it could not be compared.
        reason: why it is not exact or was not compared; empty where it is exact.
        remedy: how to get it compared; empty where there is no way.
        comparable: whether the runner can compare configs at all.
    """

    exact: bool | None
    reason: str = ""
    remedy: str = ""
    comparable: bool = True


class Exactness:
    """Compares configs with plain fp32, each in a process of its own, and keeps the findings in the study."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._not_compared: dict[str, Finding] = {}  # not kept in the study: a search that goes on with it tries again
        self._checked: dict[Config, Check] = {}  # by what was compared, whatever its batch

    def leave_out_known_failures(self) -> None:
        """Remove from the space the choices that an earlier search of the study found inexact."""
        known = self._known()
        for name, choices in self._search.history.space.choices.items():
            for choice in choices:
                if reason := known.get(_key(name, choice)):
                    self._search.leave_out(name, choice, reason)

    def leave_out_inexact(self) -> bool:
        """Remove from the space each choice of the finalists that is not exact on this model. True if there was one."""
        left_out = False
        for config in finalists_of(self._search):
            for name, choice in to_compare(config, self._search.history.space.baseline):
                if self._search.interrupted():
                    return left_out
                left_out = self._leave_out_if_inexact(name, choice, self.of(name, choice)) or left_out
        return left_out

    def may_come_in(self, config: Config) -> bool:
        """Whether a config may replace a finalist that failed: each of its exact techniques must be exact on this model.

        Where that is not known, a finalist still plays, with a warning; a replacement does not.
        """
        for name, choice in to_compare(config, self._search.history.space.baseline):
            found = self.of(name, choice)
            self._leave_out_if_inexact(name, choice, found)
            if (not found.exact and found.comparable) or self._search.interrupted():
                return False
        return True

    def _leave_out_if_inexact(self, name: str, choice: Choice, found: Finding) -> bool:
        inexact = found.exact is False and choice in self._search.history.space.choices[name]
        if inexact:
            self._search.leave_out(name, choice, found.reason)
        return inexact

    def of(self, name: str, choice: Choice) -> Finding:
        """Whether a choice of an exact technique is exact here. A search compares each choice once."""
        key = _key(name, choice)
        known = self._known()
        if key in known:
            return Finding(exact=not known[key], reason=known[key])
        if key not in self._not_compared:
            same_training = techniques.trained(self._search.history.space.baseline)
            found = self._compare(techniques.complete({**same_training, name: choice}))
            if found.exact is not None:
                self._search.store.set_attribute(ATTRIBUTE, known | {key: found.reason})
                return found
            self._not_compared[key] = found
        return self._not_compared[key]

    def not_compared(self, answer: Config) -> Iterator[tuple[str, Choice, Finding]]:
        """The choices of the answer that could not be compared in this search, and why."""
        for name, choice in to_compare(answer, self._search.history.space.baseline):
            if (found := self._not_compared.get(_key(name, choice))) is not None:
                yield name, choice, found

    def check(self, config: Config, timeout_s: float) -> Check | Outcome | NotCompared:
        """Run the checks in a process of their own, within the time that is left; where the limit is too small, in all that is free.

        Micro batches are checked where the config has more of them than the user's baseline: those are the user's own.
        """
        search = self._search
        budget, limit_bytes = search.budget, search.history.objective.memory_limit_bytes
        left_s = max(MIN_CHECK_S, budget.latest_s - budget.elapsed_s)
        settings = search.settings.replace(timeout_s=min(timeout_s + search.history.setup_s(config), left_s))
        small = not search.inspection.facts["has_batchnorm"]  # statistics of a few samples make any rounding look large
        size = BATCH_SIZE if small else min(BATCHNORM_BATCH_SIZE, search.history.space.baseline.samples_per_step)
        # fewer may be an error, and more not fit
        if search.inspection.step_samples > BATCH_SIZE or (search.inspection.shortage and small):
            size = search.inspection.step_samples
        if config.accumulation_steps <= search.history.space.baseline.accumulation_steps:
            config = config.replace(accumulation_steps=1)
        compared = config.replace(batch_size=1, accumulation_steps=min(2, config.accumulation_steps))
        if compared in self._checked:
            return self._checked[compared]

        def within(limit_bytes: int) -> Check | Outcome | NotCompared:
            return search.runner.check(config, settings.replace(memory_limit_bytes=limit_bytes), size)

        started_s = budget.elapsed_s
        try:
            with budget.split("checks"):
                found = within(limit_bytes)
                if isinstance(found, Outcome) and found.kind is Kind.OOM:  # plain fp32 may be what does not fit
                    found = search.runner.in_all_that_is_free(within, limit_bytes) or found
                if isinstance(found, Check):
                    self._checked[compared] = found
                return found
        except ProbeFault as fault:
            return Outcome(kind=Kind.TIMEOUT, cause=str(fault))
        finally:
            budget.check_s = max(budget.check_s, budget.elapsed_s - started_s)

    def _known(self) -> dict[str, str]:
        return dict(self._search.store.attributes().get(ATTRIBUTE, {}))

    def _compare(self, config: Config) -> Finding:
        budget = self._search.budget
        if budget.elapsed_s > budget.budget_s:
            return Finding(exact=None, reason="the budget was spent", remedy=MORE_TIME)
        if budget.spent_s.get("checks", 0.0) > MAX_COMPARISONS_SHARE * budget.budget_s:
            return Finding(exact=None, reason="comparisons had taken their share of the budget", remedy=MORE_TIME)
        check = self.check(config, max(MIN_COMPARISON_S, MAX_CHECK_SHARE * budget.budget_s))
        if isinstance(check, NotCompared):
            return Finding(exact=None, reason=check.reason, comparable=False)
        if isinstance(check, Check):
            return Finding(exact=check.passed, reason="" if check.passed else check.reason)
        ended = f"{check.kind}: {check.cause}"
        if check.kind in (Kind.OOM, Kind.TIMEOUT):
            remedy = FREE_MEMORY if check.crowded else MORE_MEMORY if check.kind is Kind.OOM else MORE_TIME
            return Finding(exact=None, reason=f"the comparison did not finish ({ended})", remedy=remedy)
        return Finding(exact=False, reason=f"it did not run ({ended})")


def to_compare(config: Config, baseline: Config) -> Iterator[tuple[str, Choice]]:
    """The choices that differ from the baseline's and claim to be exact."""
    for name, choice in config.differences(baseline).items():
        if name in BATCH_KEYS:
            continue
        technique = techniques.REGISTRY[name]
        claims = technique.exact and technique.phase is not techniques.Phase.LOADER and choice != technique.off
        if claims:
            yield name, choice


def _key(name: str, choice: Choice) -> str:
    return f"{name}={choice}"
