"""What may befall a search on a Ray cluster: no finished trial is lost, all goes on, and no process is left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("ray") is None:
    pytest.skip("needs Ray: pip install 'autotune-torch[ray]'", allow_module_level=True)

from autotune.runners.ray import RayRunner
from autotune.runners.runner import NoSlotLeft, SlotLost
from tests import played_cluster as faults
from tests.played_cluster import Cost, Played, played_cluster, probe, running, small_disk, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    with small_disk(tmp_path_factory.mktemp("disk") / "small") as small, played_cluster(small) as played:
        yield played


@pytest.mark.parametrize(
    ("fault", "lost"),
    [
        (faults.kill_worker, "crashed"),
        (faults.kill_actor, "run again elsewhere"),
        (faults.stop_supervisor, "run again elsewhere"),
        (faults.fill_disk, "run again elsewhere"),
    ],
)
def test_a_fault_costs_one_probe_at_most_and_its_slot_comes_back(
    played: Played, fault: Callable[[Played, RayRunner], Cost], lost: str, tmp_path: Path
) -> None:
    if fault is faults.fill_disk and not os.path.ismount(played.small):
        pytest.skip("this user may not mount a small disk")
    with running(played, tmp_path) as runner:
        cost = fault(played, runner)
        assert (cost.lost, cost.left) == (lost, 0) and cost.back_s is not None
    wait_for(lambda: not played.ours())


@pytest.mark.parametrize("fault", [faults.kill_raylet, faults.remove_node])
def test_what_a_lost_node_ran_runs_elsewhere_and_another_node_is_used(
    fault: Callable[[Played, RayRunner], Cost], tmp_path: Path
) -> None:
    with played_cluster(tmp_path) as played, running(played, tmp_path) as runner:
        cost = fault(played, runner)
        assert (cost.lost, cost.left) == ("run again elsewhere", 0)
        played.add_node()
        [gained] = wait_for(runner.new_slots)
        runner.submit(probe(), gained)
        finished = runner.collect()
        assert finished is not None and finished.result.ok and finished.result.slot == gained


def test_a_cluster_that_shrinks_to_nothing_has_no_slot_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.runners.ray.ANOTHER_S", 1.0)
    monkeypatch.setattr("autotune.runners.ray.MOST_LOSSES", 1)
    with played_cluster(tmp_path) as played, running(played, tmp_path) as runner:
        for expected in (SlotLost, NoSlotLeft):
            ticket = runner.submit(probe(faults.HANGS))
            played.supervisor(on_second=False).parent().kill()
            with pytest.raises(expected) as raised:
                runner.collect()
            assert raised.value.tickets == (ticket,)
        with pytest.raises(NoSlotLeft):
            runner.submit(probe())


@pytest.mark.parametrize("own", [False, True])
def test_a_driver_that_is_killed_leaves_its_trials_and_no_process(own: bool, played: Played, tmp_path: Path) -> None:
    cost = faults.kill_driver(None if own else played, tmp_path)
    assert (cost.lost, cost.left) == ("0 finished trials", 0)
    assert not played.ours()
