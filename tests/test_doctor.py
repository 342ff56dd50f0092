"""`autotune doctor`: what a search assumes holds here, and a broken assumption is shown as such, with what it means."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune import doctor
from autotune.devices import instruments
from autotune.doctor import checks, verdicts
from autotune.doctor.verdicts import State, judge_tested
from autotune.records.device import DeviceInfo
from autotune.report.terminal import as_text
from autotune.units import GIB, MIB
from tests.devices.fake_nvml import FakeGpu, install

SURE = {
    "device",
    "memory limit",
    "out of memory",
    "other errors",
    "peak memory",
    "data workers",
    "fork server",
    "study",
    "devices together",
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "communicator",
}


@pytest.mark.timeout(400)
def test_on_this_machine_every_line_is_ok_or_says_why_it_cannot_be_told(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autotune", "doctor", "--devices", "cpu:2", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=390)
    told = json.loads(done.stdout)
    states = {line["name"]: line["state"] for line in told["lines"]}
    assert {name: states[name] for name in SURE} == dict.fromkeys(SURE, State.OK), told
    assert all(line["found"] for line in told["lines"])
    assert done.returncode == (State.DIFFERS in states.values())
    assert "checking memory limit" in done.stderr
    facts = {line["name"]: line["facts"] for line in told["lines"]}
    assert facts["out of memory"]["error"].startswith("RuntimeError: [enforce fail at alloc_cpu.cpp")
    assert facts["NVML"]["why_none"]
    assert [len(rank["seconds"]["all-reduce"]) for rank in facts["all-reduce"]["ranks"]] == [3, 3]
    assert_nothing_names_a_person_a_process_or_a_place(done.stdout, tmp_path)
    assert not list(tmp_path.iterdir())


def assert_nothing_names_a_person_a_process_or_a_place(text: str, folder: Path) -> None:
    for named in (str(folder), sys.prefix, str(Path.home()), os.path.dirname(doctor.__file__)):
        assert named not in text
    assert not re.search(r"\bpid\b[^a-z]*\d", text)


LIMIT = {
    "limit_bytes": GIB,
    "start_bytes": 200 * MIB,
    "block_bytes": 8 * MIB,
    "allocated_bytes": 800 * MIB,
    "attempted_bytes": 8 * MIB,
    "held_bytes": GIB - 4 * MIB,
    "error": "OutOfMemoryError: CUDA out of memory.",
    "recognised": True,
    "crowded": False,
}
BOOKS = {
    "allocated_bytes": 256 * MIB,
    "grown_bytes": 256 * MIB,
    "kept_bytes": 257 * MIB,
    "peak_bytes": 700 * MIB,
    "booked_bytes": 704 * MIB,
}
TOGETHER = {
    "kept": True,
    "devices": ["cuda:0", "cuda:1"],
    "ranks": [
        {"sum": 3.0, "expected": 3.0, "outside_bytes": 300 * MIB, "bytes": [GIB], "seconds": {"all-reduce": [0.5]}},
        {"sum": 2.0, "expected": 3.0, "outside_bytes": 300 * MIB, "bytes": [GIB], "seconds": {"all-reduce": [0.1]}},
    ],
}
PROBE = {"samples_per_s": 100.0, "peak_bytes": GIB, "disturbances": []}


@pytest.mark.parametrize(
    ("judge", "facts", "state", "meaning"),
    [
        (verdicts.judge_limit, LIMIT, State.OK, ""),
        (verdicts.judge_limit, {**LIMIT, "error": ""}, State.DIFFERS, "do not fit would run"),
        (verdicts.judge_limit, {**LIMIT, "held_bytes": 2 * GIB}, State.DIFFERS, "--headroom"),
        (verdicts.judge_limit, {**LIMIT, "held_bytes": GIB // 2}, State.DIFFERS, "configs that fit"),
        (verdicts.judge_limit, {**LIMIT, "held_bytes": GIB // 2, "crowded": True}, State.UNAVAILABLE, "end them"),
        (verdicts.judge_recognition, LIMIT, State.OK, ""),
        (verdicts.judge_recognition, {**LIMIT, "recognised": False}, State.DIFFERS, "count as errors"),
        (verdicts.judge_other_error, {"error": "RuntimeError: shapes", "recognised": False}, State.OK, ""),
        (verdicts.judge_other_error, {"error": "RuntimeError: shapes", "recognised": True}, State.DIFFERS, "hidden"),
        (verdicts.judge_peak, BOOKS, State.OK, ""),
        (verdicts.judge_peak, {**BOOKS, "grown_bytes": 100 * MIB}, State.DIFFERS, "--headroom"),
        (verdicts.judge_peak, {**BOOKS, "kept_bytes": 0}, State.DIFFERS, "--headroom"),
        (verdicts.judge_books, BOOKS, State.OK, ""),
        (verdicts.judge_books, {**BOOKS, "booked_bytes": 0}, State.UNAVAILABLE, "growth of the whole card"),
        (verdicts.judge_books, {**BOOKS, "booked_bytes": None}, State.UNAVAILABLE, "growth of the whole card"),
        (verdicts.judge_books, {**BOOKS, "booked_bytes": 2 * GIB}, State.DIFFERS, "--headroom"),
        (verdicts.judge_clock, {"wall_s": 1.0, "device_s": 0.98}, State.OK, ""),
        (verdicts.judge_clock, {"wall_s": 1.0, "device_s": 0.5}, State.DIFFERS, "speeds"),
        (verdicts.judge_workers, {"sum": 1.0, "expected": 2.0}, State.DIFFERS, "data workers"),
        (
            verdicts.judge_page_locked,
            {"pinned_bytes_per_s": 1.0, "pageable_bytes_per_s": 2.0},
            State.DIFFERS,
            "gain nothing",
        ),
        (verdicts.judge_fork, {"slow_start": "every probe starts a new interpreter"}, State.DIFFERS, "seconds longer"),
        (verdicts.judge_equal, {"measured": [PROBE, PROBE]}, State.OK, ""),
        (verdicts.judge_equal, {"measured": [PROBE, {**PROBE, "samples_per_s": 140.0}]}, State.DIFFERS, "small gains"),
        (verdicts.judge_equal, {"measured": [PROBE, {**PROBE, "peak_bytes": 2 * GIB}]}, State.DIFFERS, "memory"),
        (
            verdicts.judge_equal,
            {"measured": [PROBE, {**PROBE, "disturbances": ["others"]}]},
            State.UNAVAILABLE,
            "quieter",
        ),
        (verdicts.judge_cards, {"same": ["cuda:0 and cuda:1"]}, State.DIFFERS, "a card for each rank"),
        (verdicts.judge_paths, {"paths": {"cuda:0 and cuda:1": "over NVLink"}}, State.OK, ""),
        (verdicts.judge_paths, {"paths": {"cuda:0 and cuda:1": ""}, "why": "unknown"}, State.UNAVAILABLE, ""),
        (verdicts.judge_group, TOGETHER, State.DIFFERS, "gradients would be wrong"),
        (verdicts.judge_prediction, {"measured": [PROBE], "predicted": (GIB, GIB - 1, GIB + 1)}, State.OK, ""),
        (verdicts.judge_prediction, {"measured": [PROBE], "predicted": (1, 1, 2)}, State.DIFFERS, "out of memory"),
        (
            verdicts.judge_prediction,
            {"measured": [PROBE], "predicted": None, "untraced": ["x"]},
            State.UNAVAILABLE,
            "probes",
        ),
        (judge_tested, {"device_kind": "cpu", "processor": "x86_64"}, State.OK, ""),
        (judge_tested, {"device_kind": "cpu", "processor": "aarch64"}, State.UNAVAILABLE, "proof for this machine"),
        (judge_tested, {"device_kind": "cuda", "processor": "x86_64"}, State.UNAVAILABLE, "proof for this GPU"),
        (verdicts.judge_study, {"error": "OSError: [Errno 30] Read-only file system"}, State.DIFFERS, "--storage"),
        (verdicts.judge_compiler, {"missing": "torch.compile needs triton"}, State.UNAVAILABLE, "torch.compile"),
        (
            verdicts.judge_release,
            {"gpu": True, "held_bytes": GIB, "while_bytes": 2 * GIB, "after_bytes": 2 * GIB, "released_s": 5.0},
            State.DIFFERS,
            "less memory than the one before",
        ),
    ],
)
def test_a_judge_says_what_facts_mean_for_a_search(
    judge: verdicts.Judge, facts: dict[str, Any], state: State, meaning: str
) -> None:
    line = doctor._line("name", facts, judge)
    assert (line.state, meaning in line.meaning) == (state, True), line
    assert line.found


def test_the_slowest_rank_says_how_fast_a_collective_is() -> None:
    _, said, _ = verdicts.judge_collective("all-reduce", 2.0)(TOGETHER)
    assert said == "2 GiB/s for 1.00 GiB"  # each link carries 2 (n - 1) / n times the tensor


def test_links_are_told_of_the_gpus_that_cuda_means_where_it_puts_the_fastest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    h200s = [FakeGpu(f"GPU-{number}", ancestor=10, num_links=18) for number in (2, 3)]
    install(monkeypatch, FakeGpu("GPU-1", "Tesla T4", ancestor=10), *h200s)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    info = DeviceInfo(name="cuda", model="", total_bytes=GIB, free_bytes=GIB)
    told = instruments.Answer(gpus=tuple(instruments.AskedGpu(uuid=uuid, info=info) for uuid in "231"))
    monkeypatch.setattr(instruments, "ask_torch", lambda: told)
    assert checks.connections(("cuda:0", "cuda:1", "cuda:2"))["paths"] == {
        "cuda:0 and cuda:1": "over NVLink (18 links)",
        "cuda:0 and cuda:2": "over one PCIe switch",
        "cuda:1 and cuda:2": "over one PCIe switch",
    }


def test_two_parts_of_one_card_are_not_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "connections", lambda names: {"paths": {}, "same": ["cuda:0 and cuda:1"], "why": "?"})
    lines = doctor._together(("cuda:0", "cuda:1"), lambda name: None)
    assert [line.state for line in lines] == [State.DIFFERS, State.UNAVAILABLE]


def test_a_check_that_fails_hangs_or_dies_is_shown_as_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = doctor._line("name", checks.in_process("no such test", "cpu"), verdicts.judge_limit)
    assert (failed.state, failed.found) == (State.DIFFERS, "KeyError: 'no such test'")
    monkeypatch.setattr(checks, "CHECK_TIMEOUT_S", 0.0)
    hung = doctor._line("name", checks.in_process("hold", "cpu"), verdicts.judge_limit)
    assert (hung.state, "did not end within" in hung.found) == (State.DIFFERS, True)


STUCK = """
from multiprocessing.context import ForkServerProcess
from autotune import doctor
from autotune.cli import main
from autotune.doctor import checks, verdicts

ForkServerProcess.kill = lambda process: None
checks.CHECK_TIMEOUT_S, checks.RELEASE_S = 0.0, 0.1
examined = [doctor._line("name", checks.in_process("hold", "cpu"), verdicts.judge_limit)]
examined.append(doctor._line("kill", checks.kill_and_watch("cpu"), verdicts.judge_release))
doctor.examine = lambda device, tell, devices: examined
raise SystemExit(main(["doctor"]))
"""


def test_a_process_that_cannot_be_killed_is_said_to_be_stuck_and_the_doctor_ends(tmp_path: Path) -> None:
    with (tmp_path / "told").open("w") as told:
        started = subprocess.Popen([sys.executable, "-c", STUCK], stdout=told, stderr=told, start_new_session=True)
        try:
            assert started.wait(timeout=100) == 1
        finally:
            os.killpg(started.pid, signal.SIGKILL)
    assert "stuck in the driver" in " ".join((tmp_path / "told").read_text().split())


def test_a_broken_assumption_is_named_again_below_the_table() -> None:
    facts = {**LIMIT, "recognised": False}
    lines = [
        doctor._line("memory limit", facts, verdicts.judge_limit),
        doctor._line("oom", facts, verdicts.judge_recognition),
    ]
    text = " ".join(as_text(doctor.sections(lines), 120).split())
    assert "does not hold here: oom" in text
    assert "count as errors" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "OSError: /home/ann/x.py: DataLoader worker (pid(s) 12, 13) died",
            "OSError: <path>: DataLoader worker (pid(s) <number>) died",
        ),
        ("File '/home/ann/my work/x.py', line 3", "File <path>, line 3"),
        (
            "of which 1.00 MiB is free. Process 3847 has 22.00 GiB",
            "of which 1.00 MiB is free. Process <number> has 22.00 GiB",
        ),
        ("790 GFLOP/s, 3 GiB/s", "790 GFLOP/s, 3 GiB/s"),
    ],
)
def test_texts_keep_no_paths_and_no_process_ids(text: str, expected: str) -> None:
    line = doctor._line("name", {"failure": text}, verdicts.judge_limit)
    (told,) = doctor.plain([line])["lines"]
    assert told["found"] == told["facts"]["failure"] == expected
