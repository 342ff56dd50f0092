"""What the search needs of a prober: run a config, get an outcome. Processes, recorded tables and closed forms all fit."""

from __future__ import annotations

from typing import Protocol

from autotune.records.config import Config
from autotune.records.outcome import Outcome
from autotune.records.settings import ProbeSettings


class Prober(Protocol):
    """Runs configs."""

    def run(self, config: Config, settings: ProbeSettings) -> Outcome:
        """Train a few steps of `config` and say what was found. Never raises for what the config or the user's code does."""
