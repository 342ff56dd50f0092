"""Slots on the nodes of a Ray cluster: two played nodes with two slots each. Whatever dies, no finished trial and no process is left."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import ConfigError, DeviceError, TaskError
from autotune.records.outcome import Kind, Outcome
from autotune.runners.in_flight import Host
from autotune.runners.ray import RayRunner, Wish
from autotune.runners.remote import RemoteMember
from autotune.task.parcel import pack
from autotune.task.source import TaskSource
from tests.played_cluster import MODEL, Cost, Played, kill_actor, kill_worker, played_cluster, probe
from tests.short_play_off import AUTOTUNE

if find_spec("ray") is None:
    pytest.skip("needs Ray: pip install 'autotune-torch[ray]'", allow_module_level=True)
pytestmark = pytest.mark.timeout(300)  # whatever else the machine does
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    with played_cluster(tmp_path_factory.mktemp("second")) as played:
        yield played


def test_a_whole_search_of_a_study(cluster: Played, tmp_path: Path, measured_once: None) -> None:
    small = {"DIGITS_WIDTH": "4", "DIGITS_DEPTH": "1", "DIGITS_PIXELS": "8"}
    options = ["--runner", f"ray:{cluster.address}", "--slots", "cpu:2", "--budget", "90s", "--trials", "6", "--json"]
    done = subprocess.run(
        [*AUTOTUNE, "search", str(ROOT / "studies" / "digits" / "model.py"), *options],
        cwd=tmp_path,
        env={**os.environ, **small, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stderr)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["config"] and result["outcomes"]["ok"] >= 2  # on a busy machine there is time for no more
    assert "DIGITS_WIDTH" in done.stderr and "4 slots on 2 nodes" in done.stderr
    assert not cluster.ours()


@pytest.fixture(scope="module")
def runner(cluster: Played, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayRunner]:
    folder = tmp_path_factory.mktemp("ray")
    (folder / "model.py").write_text(MODEL)
    source = TaskSource.of(folder / "model.py")
    with RayRunner(source, address=cluster.address, slots="cpu:2", logs=folder / "logs") as runner:
        yield runner


def collect(runner: RayRunner, number: int) -> list[Outcome]:
    found = []
    for _ in range(number):
        finished = runner.collect()
        assert finished is not None
        found.append(finished.result)
    return sorted(found, key=lambda outcome: outcome.slot)


def test_each_node_has_its_slots_and_is_named(runner: RayRunner) -> None:
    names = [slot.name for slot in runner.slots()]
    host = names[0].partition("/")[0]
    assert names == [f"{host}/cpu:0", f"{host}.2/cpu:0", f"{host}/cpu:1", f"{host}.2/cpu:1"]
    assert {slot.device.num_threads for slot in runner.slots()} == {1}
    assert runner.notes[0].startswith("4 slots on 2 nodes: ") and "sent to each node: model.py (" in runner.notes[1]


def test_probes_run_at_once_on_all_of_them_and_their_logs_come_home(runner: RayRunner) -> None:
    for size in (4, 8, 12, 16):
        runner.submit(probe(size))
    with pytest.raises(RuntimeError, match="all slots are taken"):
        runner.submit(probe())
    outcomes = collect(runner, 4)
    assert [(outcome.kind, outcome.slot) for outcome in outcomes] == [
        (Kind.OK, s.name) for s in sorted(runner.slots(), key=str)
    ]
    assert all(len(outcome.beside) == 3 for outcome in outcomes)
    own_score = Path("/proc/self/oom_score_adj").read_text().strip()
    for outcome in outcomes:  # and what Ray does to its workers is undone
        assert f"nice {os.nice(0)} score {own_score} OMP None" in Path(outcome.log).read_text()


def test_a_probe_is_followed_and_ended_by_its_ticket(runner: RayRunner) -> None:
    ticket = runner.submit(probe())
    assert runner.progress(ticket) is not None and runner.progress(ticket + 1) is None
    runner.cancel(ticket)
    assert collect(runner, 1)[0].kind in (Kind.TIMEOUT, Kind.OK)  # it may have ended before


@pytest.mark.parametrize(("fault", "lost"), [(kill_worker, "crashed"), (kill_actor, "run again elsewhere")])
def test_who_dies_takes_one_probe_along_and_no_slot_is_gone_for_long(
    fault: Callable[[Played, RayRunner], Cost], lost: str, cluster: Played, runner: RayRunner
) -> None:
    cost = fault(cluster, runner)
    assert (cost.lost, cost.left) == (lost, 0)
    assert len(runner.slots()) == 4


def test_data_that_a_node_has_not_is_told_with_the_node(runner: RayRunner, tmp_path: Path) -> None:
    """The runner's own actor is asked, as it would be for another task."""
    (tmp_path / "data").mkdir()
    (tmp_path / "model.py").write_text(f"{MODEL}\nDATA = '{tmp_path}/data'")
    parcel = pack(TaskSource.of(tmp_path / "model.py"))
    (tmp_path / "data").rmdir()
    member = runner._members[runner.slots()[0].name]
    assert isinstance(member, RemoteMember)
    other = RemoteMember(
        member.name,
        member._line,
        member._device,
        member._share,
        parcel,
        host=Host(),
        logs=tmp_path,
        import_timeout_s=60.0,
    )
    with pytest.raises(
        TaskError, match=f"on {member.machine}: there is no {tmp_path}/data, which the task's code names"
    ):
        other.__enter__()


def node(number: int, gpus: int) -> dict[str, Any]:
    """A node as Ray tells of it."""
    resources = {"CPU": 8.0, **({"GPU": float(gpus)} if gpus else {})}
    return {
        "NodeID": str(number),
        "Alive": True,
        "NodeManagerHostname": f"node{number}",
        "NodeManagerAddress": f"10.0.0.{number}",
        "Resources": resources,
    }


@pytest.mark.parametrize(
    ("devices", "gpus", "told"),
    [
        ("1", 0, "none has a GPU"),
        ("4", 2, r"--devices 4 are more than one node has \(2\).*--devices 2x2"),
        ("2x2", 2, "2 nodes are to train together, and 1 has what each of them takes"),
    ],
)
def test_where_no_node_has_room_for_a_slot_it_is_told_why(devices: str, gpus: int, told: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    runner = RayRunner(TaskSource.of(tmp_path / "model.py"), logs=tmp_path / "logs", device="cuda", devices=devices)
    nodes = [node(1, gpus), node(2, 0)]
    assert not runner._seats(nodes)
    with pytest.raises(DeviceError, match=told):
        runner._require_room(nodes)


def test_nodes_that_train_together_have_their_ranks_and_none_is_in_two_pairs(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    runner = RayRunner(TaskSource.of(tmp_path / "model.py"), logs=tmp_path / "logs", device="cuda", devices="2x2")
    assert runner.world.size == 4
    [pair] = runner._seats([node(1, 2), node(2, 0), node(3, 2)])
    parts = [place.share.part for place in pair]
    assert [place.node for place in pair] == ["node1", "node3"]
    assert [(part.first, part.world_size, part.address) for part in parts if part] == [
        (0, 4, "10.0.0.1"),
        (2, 4, "10.0.0.3"),
    ]
    runner._asked[pair] = "node1+node3/cuda:0,1+0,1"
    [other] = runner._seats([node(1, 2), node(3, 2), node(4, 2), node(5, 2)])
    assert [place.node for place in other] == ["node4", "node5"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("auto", "1", "1"), Wish(kind="auto")),
        (("auto", "1", "all"), Wish(kind="auto")),
        (("cuda", "4", "2"), Wish(kind="cuda", size=4, most=2)),
        (("auto", "cpu:2", "cpu:3"), Wish(kind="cpu", size=2, parts=3)),
        (("auto", "2x4", "all"), Wish(kind="auto", size=4, nodes=2)),
        (("auto", "cpu:2x1", "1"), Wish(kind="cpu", nodes=2)),
    ],
)
def test_the_options_say_which_slots(options: tuple[str, str, str], expected: Wish) -> None:
    assert Wish.of(*options) == expected


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        (Wish(kind="cpu"), {"device": "cpu"}),
        (Wish(kind="cuda", size=4), {"devices": "4"}),
        (Wish(kind="cpu", size=2), {"devices": "cpu:2"}),
        (Wish(kind="cuda", size=4, nodes=2), {"devices": "2x4"}),
    ],
)
def test_what_trained_on_a_node_is_asked_of_this_machine_to_run_the_answer(
    wish: Wish, expected: dict[str, str]
) -> None:
    assert wish.devices_here == expected


def test_a_runner_says_so_of_its_slots(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    runner = RayRunner(TaskSource.of(tmp_path / "model.py"), devices="cpu:2", logs=tmp_path)
    assert runner.devices_here == {"devices": "cpu:2"}


@pytest.mark.parametrize(
    "options",
    [
        ("cuda:1", "1", "1"),
        ("auto", "cuda:0,1", "1"),
        ("auto", "all", "1"),
        ("auto", "1", "cuda:0"),
        ("cuda", "1", "cpu:2"),
    ],
)
def test_options_that_name_one_machines_devices_are_refused(options: tuple[str, str, str]) -> None:
    with pytest.raises(ConfigError, match=r"expected|contradict"):
        Wish.of(*options)
