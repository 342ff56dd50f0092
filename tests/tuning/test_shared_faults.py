"""Whatever goes wrong while several searches share a study: no trial that has ended is lost, and all of them leave with one answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests import shared_faults
from tests.postgres import Server, server
from tests.shared_faults import Aftermath

__all__ = ["server"]

DEAD = {shared_faults.kill_in_a_probe, shared_faults.kill_in_the_play_off}
AT_ONCE = [shared_faults.restart]  # the others take a minute and more


@pytest.mark.parametrize(
    "fault",
    [pytest.param(one, marks=[] if one in AT_ONCE else pytest.mark.slow) for one in shared_faults.FAULTS],
    ids=lambda fault: fault.__name__,
)
def test_a_fault_loses_no_trial_that_has_ended_and_leaves_nothing_behind(
    fault: Callable[..., Aftermath], server: Server
) -> None:
    if fault is shared_faults.fill_disk and not shared_faults.may_mount():
        pytest.skip("needs a small disk of its own: run it as root, where disks may be mounted")
    found = fault(server)
    assert (found.lost, found.repeated, found.left, found.answers) == (0, 0, 0, 1)
    assert found.interrupted <= (1 if fault in DEAD else 3)
