"""Which configs may be recommended: those that were compared with plain fp32 on the user's own model, and passed.

The baseline is what the user runs today, and is not compared. Of every other config, loss and gradients are compared: first with
its exact changes alone, held to the bound of exact techniques, then with all its changes. A config that does not pass, or whose
comparison does not finish or tells nothing, takes no part in the play-off and is no answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.records.check import Check, Comparison
from autotune.records.config import ACCUMULATION, BATCH_SIZE, Choice, Config
from autotune.records.inspection import STEP_SAMPLES
from autotune.records.outcome import Kind, Outcome
from autotune.runners.jobs import CheckJob, NotCompared
from autotune.runners.runner import ProbeFault
from autotune.space import CUT, Changes
from autotune.techniques import Phase, Techniques
from autotune.tuning.confirm import finalists_of
from autotune.tuning.state import Search

CHECK_BATCH_SIZE = 4
BATCHNORM_BATCH_SIZE = 64
MIN_CHECK_S = 2.0
MIN_COMPARISON_S = 10.0
CHECK_SHARE = 0.15  # of the budget, for one comparison
CHECKS_SHARE = 0.25  # of the budget, for all comparisons once a config has passed
FIRST_SHARE = 0.5  # of the time that is left, for a comparison while none has passed
LONGER = 2.0  # times as long as the last that did not finish
NOT_SHOWN = "was not shown to train as plain fp32 does"
MORE_TIME = "run the same command with a larger --budget: it continues this study and compares it"
MORE_MEMORY = "give a larger --memory-limit"
FREE_MEMORY = "end what else uses the device, and run the same command again: it continues this study and compares it"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the comparison of some changes with plain fp32 found.

    Attributes:
        check: the comparison; None where it did not finish, or could not be made.
        reason: why the changes did not pass; if they passed, a remark on the comparison.
        remedy: how to get them compared; empty where there is no way.
        has_finished: the comparison came to a result that another one would repeat: it did not run out of time or memory.
        comparable: whether the runner sees gradients at all. Where it does not, nothing is held against a config.
    """

    check: Check | None = None
    reason: str = ""
    remedy: str = ""
    has_finished: bool = False
    comparable: bool = True

    @property
    def clears(self) -> bool:
        """Whether the changes may be recommended."""
        return not self.comparable or (self.check is not None and self.check.passed is True)


class Clearance:
    """Compares changes with plain fp32, each time in a process of its own, and bars from the space what does not pass."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._found: dict[Changes, Finding] = {}
        self._too_short_s = 0.0  # the longest time in which a comparison did not finish

    def bar_known(self) -> None:
        """Bar what an earlier search of the study found not to pass, and take over what passed."""
        for kept in self._search.store.facts.checks:
            self._found[frozenset(kept.changes)] = _finding(kept.check)
        for changes, found in sorted(self._found.items(), key=lambda item: len(item[0])):
            if not found.clears and not any(barred <= changes for barred in self._search.history.space.barred):
                self._bar(changes, found)

    def bar_failing_finalists(self) -> bool:
        """Compare the finalists, and bar those that do not pass. True unless all of them passed: then others are finalists now."""
        configs = finalists_of(self._search)
        cleared = [self.clear(config) for config in configs if not self._search.interrupted()]
        return not all(cleared)

    def clear(self, config: Config) -> bool:
        """Whether a config may be recommended. What is not known of its changes is compared now; what fails is barred."""
        for changes in self._parts(config):
            if self._search.interrupted():
                return False
            if not self._of(changes).clears:
                self._blame(changes)
                return False
        return True

    def is_cleared(self, config: Config) -> bool:
        """Whether a config is known to be one that may be recommended. Nothing is compared."""
        if not self._search.inspection.comparable:
            return True
        return all(changes in self._found and self._found[changes].clears for changes in self._parts(config))

    def of_answer(self, config: Config) -> Finding | None:
        """What was found of all changes of a config together; None where it has none to compare, or they were not compared."""
        return self._found.get(self._compared(config))

    def _parts(self, config: Config) -> Iterator[Changes]:
        """The sets of changes that must pass: the exact ones, which the bound of reduced precision would hide, and all.

        Micro batches draw other random numbers than the whole batch, and where the loss depends on these, the comparison of all says
        little. The others are then compared on the whole batch, too.
        """
        changes = self._compared(config)
        exact = frozenset(change for change in changes if self._is_exact(change))
        if exact and exact != changes and not self._passed_with_others(exact):
            yield exact
        if not changes:
            return
        yield changes
        check, others = self._found[changes].check if changes in self._found else None, changes - {CUT}
        if others and others != changes and check is not None and check.says_little:
            yield others

    def _passed_with_others(self, exact: Changes) -> bool:
        """Whether these exact changes passed as a part of others that are exact."""
        return any(
            exact < changes and found.check is not None and found.check.exact and found.clears
            for changes, found in self._found.items()
        )

    def _compared(self, config: Config) -> Changes:
        """The changes of a config that a comparison can see, without what the user asked for though it trains otherwise."""
        asked = config.accumulation_steps in self._search.inspection.batch.optional_accumulation_steps
        return frozenset(
            (name, choice)
            for name, choice in self._search.history.space.changes(config)
            if (not asked if (name, choice) == CUT else self._acts_on_gradients(name, choice))
        )

    def _of(self, changes: Changes) -> Finding:
        """What is known of some changes. A search compares them once."""
        if changes not in self._found:
            found = self._compare(changes)
            self._found[changes] = found
            if found.check is not None:
                checks = tuple(
                    Comparison(changes=tuple(sorted(known)), check=one.check)
                    for known, one in self._found.items()
                    if one.check is not None
                )
                self._search.store.keep(checks=checks)
        return self._found[changes]

    def _blame(self, changes: Changes) -> None:
        """Bar the single changes that do not pass by themselves, or all of them together where each passes, or there is no time."""
        found = self._of(changes)
        alone = [frozenset({change}) for change in sorted(changes)] if len(changes) > 1 and found.has_finished else []
        failing = [one for one in alone if not self._search.interrupted() and not self._of(one).clears]
        guilty = [one for one in failing if self._of(one).has_finished]
        for one in guilty or [changes]:
            self._bar(one, self._of(one))

    def _bar(self, changes: Changes, found: Finding) -> None:
        """Take a choice that does not pass by itself out of the space; let no config with all of several such changes be probed."""
        history = self._search.history
        (name, choice), *others = sorted(changes)
        if not others and name != ACCUMULATION and name not in history.space.fixed and found.has_finished:
            if choice not in history.space.choices[name]:
                return
            history.space = history.space.without(name, {choice})
            text = f"{name}={choice} is left out: {found.reason}"
        else:
            history.space = history.space.barring(changes)
            is_said = "differs from plain fp32" if found.check and found.check.passed is False else NOT_SHOWN
            told = "; ".join(filter(None, (found.reason, found.remedy)))
            text = f"{_in_words(changes)} {is_said}, and is not recommended: {told}"
        self._search.refused.append(text)
        self._search.warn(text)

    def _compare(self, changes: Changes) -> Finding:
        budget = self._search.budget
        comparable = self._search.inspection.comparable  # else the runner says at once why not
        if comparable and budget.elapsed_s > budget.budget_s:
            return Finding(reason="the budget was spent", remedy=MORE_TIME)
        spent_s, left_s = budget.spent_s.get("checks", 0.0), max(0.0, budget.budget_s - budget.elapsed_s)
        has_passed = any(found.clears for found in self._found.values())
        if has_passed and spent_s > CHECKS_SHARE * budget.budget_s:
            return Finding(reason="comparisons had taken their share of the budget", remedy=MORE_TIME)
        timeout_s = max(MIN_COMPARISON_S, min(CHECK_SHARE * budget.budget_s, FIRST_SHARE * left_s))
        if not has_passed:  # what comes next would be as slow: without one that finishes there is no answer
            timeout_s = max(timeout_s, min(LONGER * self._too_short_s, left_s))
        check = self._run(changes, timeout_s)
        if isinstance(check, NotCompared):
            return Finding(reason=check.reason, comparable=False)
        if isinstance(check, Check):
            return _finding(check)
        if check.kind is Kind.TIMEOUT:
            self._too_short_s = max(self._too_short_s, timeout_s)
        ended = f"{check.kind}: {check.cause}"
        if check.kind in (Kind.OOM, Kind.TIMEOUT):
            remedy = FREE_MEMORY if check.crowded else MORE_MEMORY if check.kind is Kind.OOM else MORE_TIME
            return Finding(reason=f"the comparison did not finish ({ended})", remedy=remedy)
        return Finding(reason=f"the comparison did not run ({ended})", has_finished=True)

    def _run(self, changes: Changes, timeout_s: float) -> Check | Outcome | NotCompared:
        """Run a comparison within a time; where the memory limit is too small for it, in all that is free, then on fewer samples."""
        search = self._search
        budget, limit_bytes = search.budget, search.history.objective.memory_limit_bytes
        config = self._config(changes)
        left_s = max(MIN_CHECK_S, budget.latest_s - budget.elapsed_s)
        settings = search.settings.replace(timeout_s=min(timeout_s + search.history.setup_s(config), left_s))
        small = not search.inspection.facts.has_batchnorm  # statistics of a few samples make any rounding look large
        size = CHECK_BATCH_SIZE if small else min(BATCHNORM_BATCH_SIZE, search.history.space.baseline.samples_per_step)
        inspection = search.inspection
        # another number may be an error, and more may not fit
        if inspection.step_samples != STEP_SAMPLES or (inspection.shortage and small):
            size = inspection.step_samples
        size = min(size, inspection.facts.dataset_size or size)

        def within(limit_bytes: int) -> Check | Outcome | NotCompared:
            limited = settings.replace(memory_limit_bytes=limit_bytes)
            return search.runner.run(CheckJob(config=config, settings=limited, batch_size=size))

        least = search.settings.world.size * (2 if CUT in changes else 1)
        started_s = budget.elapsed_s
        try:
            with budget.split("checks"):
                while _is_short(found := within(limit_bytes)):  # plain fp32 may be what does not fit
                    found = search.runner.in_all_that_is_free(within, limit_bytes) or found
                    if not _is_short(found) or not small or size // 2 < least:
                        break
                    size //= 2
                return found
        except ProbeFault as fault:
            return Outcome(kind=Kind.TIMEOUT, cause=str(fault))
        finally:
            budget.check_s = max(budget.check_s, budget.elapsed_s - started_s)

    def _config(self, changes: Changes) -> Config:
        """A config with these changes, beside what the baseline has of exact techniques: some cannot do without each other."""
        baseline = self._search.history.space.baseline
        own = {
            name: choice
            for name, choice in baseline.items()
            if name in self._techniques and self._acts_on_gradients(name, choice) and self._is_exact((name, choice))
        }
        steps = 2 if CUT in changes else 1
        said: Mapping[str, Any] = {name: choice for name, choice in changes if name != ACCUMULATION}
        plan = {BATCH_SIZE: 1, ACCUMULATION: steps}
        techniques = self._techniques
        return techniques.complete({**techniques.trained(baseline), **own, **said, **plan})

    @property
    def _techniques(self) -> Techniques:
        return self._search.history.space.techniques

    def _acts_on_gradients(self, name: str, choice: Choice) -> bool:
        """Whether a comparison of gradients can tell anything of a choice: it is on, and trains the same from the same batches."""
        technique = self._techniques[name]
        return choice != technique.off and technique.phase not in (Phase.LOADER, Phase.TASK)

    def _is_exact(self, change: tuple[str, Choice]) -> bool:
        name, _ = change
        return name == ACCUMULATION or self._techniques[name].exact


def _is_short(found: Check | Outcome | NotCompared) -> bool:
    return isinstance(found, Outcome) and found.kind is Kind.OOM


def _finding(check: Check) -> Finding:
    return Finding(check=check, reason=check.reason, has_finished=True)


def _in_words(changes: Changes) -> str:
    named = [f"{name}={choice}" for name, choice in sorted(changes) if name != ACCUMULATION]
    return " with ".join([*named, *(["more micro batches in a step"] if CUT in changes else [])])
