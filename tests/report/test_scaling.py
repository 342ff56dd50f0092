from __future__ import annotations

from autotune.records.scaling import Scaling
from autotune.report.scaling import scaling_section
from autotune.report.terminal import as_text
from autotune.techniques import find_techniques
from tests.records.test_scaling import on


def test_each_number_of_devices_has_a_row_and_what_more_of_them_add_is_said() -> None:
    told = as_text([scaling_section(Scaling.of([on(1, 100.0), on(2, 180.0)]), find_techniques())], 100)
    assert "90% (" in told
    assert "2 processes: 1.80x the throughput of 1." in told
