"""Whether configs compute on the user's own model what plain fp32 does: exact techniques one by one, and the answer as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autotune import techniques
from autotune.records.config import Choice, Config
from autotune.records.inspection import Inspection
from autotune.records.outcome import Kind, Outcome
from autotune.records.result import Check
from autotune.runners.local import ProbeFault, ProcessProber
from autotune.tuning.loop import Loop
from autotune.tuning.why import OWN_STUDY

BATCH_SIZE = 4
BATCHNORM_BATCH_SIZE = 64
MIN_CHECK_S = 10.0
MAX_CHECK_SHARE = 0.05  # of the budget, for one check
ATTRIBUTE = "exactness"  # of the study: why a choice is not exact, empty where it is
MORE_TIME = "give a larger --budget, and the same command goes on with this study and compares it"
MORE_MEMORY = f"give a larger --memory-limit, {OWN_STUDY}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is known of one choice of an exact technique on this model.

    Attributes:
        exact: None where it could not be compared.
        reason: why it is not exact, or was not compared; empty where it is exact.
        remedy: what would let it be compared.
    """

    exact: bool | None
    reason: str = ""
    remedy: str = ""


class Exactness:
    """Compares configs with plain fp32, each in a process of its own, and keeps in the study what was found."""

    def __init__(self, loop: Loop, prober: ProcessProber, inspection: Inspection) -> None:
        self._loop = loop
        self._prober = prober
        self._inspection = inspection
        self._not_compared: dict[str, Finding] = {}  # not kept in the study: a search that goes on with it tries again

    def known_failures(self) -> list[tuple[str, Choice, str]]:
        """The choices in the space that an earlier search of the study found not to be exact, with the reason."""
        known = self._known()
        return [
            (name, choice, known[_key(name, choice)])
            for name, choices in self._loop.space.choices.items()
            for choice in choices
            if known.get(_key(name, choice))
        ]

    def of(self, name: str, choice: Choice) -> Finding:
        """Whether a choice of an exact technique is exact here. Compared once in a search."""
        key = _key(name, choice)
        known = self._known()
        if key in known:
            return Finding(exact=not known[key], reason=known[key])
        if key not in self._not_compared:
            found = self._compare(techniques.complete({name: choice}))
            if found.exact is not None:
                self._loop.store.set_attribute(ATTRIBUTE, known | {key: found.reason})
                return found
            self._not_compared[key] = found
        return self._not_compared[key]

    def not_compared(self, name: str, choice: Choice) -> Finding | None:
        """Why a choice could not be compared in this search; None where it was, or was not asked for."""
        return self._not_compared.get(_key(name, choice))

    def check(self, config: Config, timeout_s: float) -> Check | Outcome:
        """Run the checks in a process of their own, within the time that is left."""
        settings = self._loop.settings.replace(timeout_s=min(timeout_s, max(MIN_CHECK_S, self._loop.left_s)))
        small = not self._inspection.facts["has_batchnorm"]  # statistics of a few samples make any rounding look large
        size = BATCH_SIZE if small else min(BATCHNORM_BATCH_SIZE, self._loop.space.baseline.samples_per_step)
        try:
            return self._prober.check(config, settings, size)
        except ProbeFault as fault:
            return Outcome(kind=Kind.TIMEOUT, cause=str(fault))

    def _known(self) -> dict[str, str]:
        return dict(self._loop.store.attributes().get(ATTRIBUTE, {}))

    def _compare(self, config: Config) -> Finding:
        if self._loop.elapsed_s > self._loop.budget_s:
            return Finding(exact=None, reason="the budget was spent", remedy=MORE_TIME)
        check = self.check(config, max(MIN_CHECK_S, MAX_CHECK_SHARE * self._loop.budget_s))
        if isinstance(check, Outcome):
            ended = f"{check.kind}: {check.cause}"
            if check.kind in (Kind.OOM, Kind.TIMEOUT):
                remedy = MORE_MEMORY if check.kind is Kind.OOM else MORE_TIME
                return Finding(exact=None, reason=f"the comparison did not end ({ended})", remedy=remedy)
            return Finding(exact=False, reason=f"it did not run ({ended})")
        return Finding(exact=check.passed, reason="" if check.passed else check.reason)


def to_compare(config: Config, baseline: Config) -> Iterator[tuple[str, Choice]]:
    """The choices in which a config differs from the baseline and that claim to be exact."""
    for name, choice in config.differences(baseline).items():
        technique = techniques.REGISTRY[name]
        claims = technique.exact and technique.phase is not techniques.Phase.LOADER and choice != technique.off
        if claims and name != "accumulation_steps":
            yield name, choice


def _key(name: str, choice: Choice) -> str:
    return f"{name}={choice}"
