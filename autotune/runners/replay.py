"""`ReplayProber`: a recorded table in the place of a device, so that a search strategy is measured without one."""

from __future__ import annotations

import random

from autotune.records.config import Config
from autotune.records.outcome import Kind, Outcome
from autotune.records.settings import ProbeSettings
from autotune.runners.table import Row, Table, TableError


class ReplayProber:
    """Answers from a table: each probe of a config is one of its recorded repeats, drawn without replacement.

    A memory limit below a config's recorded peak makes it run out of memory, as it would have.

    Args:
        seed: of the order in which repeats are drawn. When all have been drawn, they are drawn again.
    """

    def __init__(self, table: Table, *, seed: int = 0) -> None:
        self._table = table
        self._seed = seed
        self._drawn: dict[Config, list[Row]] = {}

    def run(self, config: Config, settings: ProbeSettings) -> Outcome:
        """The outcome of one recorded repeat within the settings' memory limit.

        Raises:
            TableError: the table does not hold the config.
        """
        rows = self._table.repeats.get(config)
        if rows is None:
            raise TableError(
                f"the table {self._table.path} has no probe of {config.as_dict()}: {self._why_missing(config)}; "
                "search what was swept, or sweep it as well"
            )
        if not self._drawn.get(config):
            self._drawn[config] = list(rows)
            random.Random(f"{self._seed} {config}").shuffle(self._drawn[config])
        outcome = self._drawn[config].pop().outcome
        limit_bytes = settings.memory_limit_bytes
        measured = outcome.measurement
        if measured is None or limit_bytes is None or measured.peak_bytes <= limit_bytes:
            return outcome
        return Outcome(
            kind=Kind.OOM,
            cause="more than the memory limit when it was recorded",
            stage="warmup",
            wall_s=outcome.wall_s,
            peak_bytes=limit_bytes,
        )

    def _why_missing(self, config: Config) -> str:
        for name, choices in self._table.header.choices.items():
            derived = name == "accumulation_steps" and self._table.header.global_batch is not None
            if not derived and config[name] not in choices:
                return f"{name} was swept over {', '.join(map(str, choices))}"
        return "this combination was not swept"
