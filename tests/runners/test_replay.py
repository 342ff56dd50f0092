"""Replaying a recorded table in the place of a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.records.config import Config
from autotune.records.outcome import Kind
from autotune.records.settings import ProbeSettings
from autotune.runners import table
from autotune.runners.replay import ReplayProber
from autotune.runners.table import Row, Table, TableError
from tests.runners.test_table import config, ok, written

SETTINGS = ProbeSettings(device="cpu", memory_limit_bytes=None)
SPEEDS = (90.0, 100.0, 110.0)


@pytest.fixture
def recorded(tmp_path: Path) -> Table:
    rows = [Row(config=config(), repeat=i, outcome=ok(config(), speed)) for i, speed in enumerate(SPEEDS)]
    return table.read(written(tmp_path, *rows))


def speeds(prober: ReplayProber, which: Config, number: int) -> list[float]:
    found = [prober.run(which, SETTINGS).measurement for _ in range(number)]
    return [measured.samples_per_s for measured in found if measured is not None]


def test_every_repeat_is_drawn_once_before_any_is_drawn_again(recorded: Table) -> None:
    drawn = speeds(ReplayProber(recorded, seed=1), config(), 6)
    assert sorted(drawn[:3]) == sorted(drawn[3:]) == list(SPEEDS)


def test_the_order_depends_on_the_seed_alone(recorded: Table) -> None:
    orders = {tuple(speeds(ReplayProber(recorded, seed=seed), config(), 3)) for seed in range(20)}
    assert speeds(ReplayProber(recorded, seed=3), config(), 3) == speeds(ReplayProber(recorded, seed=3), config(), 3)
    assert len(orders) > 2


def test_a_limit_below_the_recorded_peak_is_out_of_memory(recorded: Table) -> None:
    prober = ReplayProber(recorded)
    outcome = prober.run(config(), SETTINGS.replace(memory_limit_bytes=10**9 - 1))
    assert (outcome.kind, outcome.peak_bytes, outcome.wall_s) == (Kind.OOM, 10**9 - 1, 1.5)
    assert prober.run(config(), SETTINGS.replace(memory_limit_bytes=10**9)).ok


def test_a_choice_that_was_not_swept_is_named(recorded: Table) -> None:
    with pytest.raises(TableError, match="checkpoint_segments was swept over 0"):
        ReplayProber(recorded).run(config(checkpoint_segments=2), SETTINGS)


def test_a_combination_that_was_not_swept_is_an_error(recorded: Table) -> None:
    with pytest.raises(TableError, match="combination"):
        ReplayProber(recorded).run(config(batch_size=8), SETTINGS)
