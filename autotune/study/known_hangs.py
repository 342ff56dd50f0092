"""Known hangs: which configs are not tried because a probe with the same new choices ran out of time."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.records.batch_plan import BATCH_KEYS
from autotune.records.config import Choice, Config
from autotune.records.outcome import Kind, Outcome


class KnownHangs:
    """Which configs a time-out rules out: those with all of its choices that have not run in any other config.

    A probe whose bound does not show that its config is slower than the fastest was ended too soon to rule anything out.
    After a time-out the choices of techniques that have not run yet are tried one at a time, so that none is blamed for
    another. As long as nothing runs, nothing is ruled out.
    """

    def __init__(self, known: Mapping[Config, Outcome]) -> None:
        self._ran = {choice for config, outcome in known.items() if outcome.ok for choice in config.choices}
        fastest = max((o.measurement.samples_per_s for o in known.values() if o.measurement), default=0.0)
        hung = [
            self._new(config)
            for config, outcome in known.items()
            if outcome.kind is Kind.TIMEOUT
            and (outcome.samples_per_s_high is None or outcome.samples_per_s_high < fastest)
        ]
        self._hung = hung if self._ran else []

    def rules_out(self, config: Config) -> bool:
        """Whether to leave the config alone."""
        new = self._new(config)
        return bool(self._hung) and (len(new) > 1 or any(blamed and blamed <= new for blamed in self._hung))

    def _new(self, config: Config) -> set[tuple[str, Choice]]:
        return {choice for choice in config.choices if choice not in self._ran and choice[0] not in BATCH_KEYS}
