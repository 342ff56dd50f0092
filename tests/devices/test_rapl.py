"""The counters of a processor's energy, played through the files in which the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.devices import open_device, rapl
from autotune.devices.linux import ProcessorWatch
from autotune.devices.rapl import EnergyWatch, why_unreadable

RANGE_UJ = 262_143_328_850


def write(folder: Path, zone: str, name: str, counted_j: float) -> None:
    at = folder / zone
    at.mkdir(exist_ok=True)
    (at / "name").write_text(f"{name}\n")
    (at / "max_energy_range_uj").write_text(f"{RANGE_UJ}\n")
    (at / "energy_uj").write_text(f"{round(counted_j * 1e6)}\n")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A machine of two sockets whose memory has a counter, and counters that count the same once more."""
    write(tmp_path, "intel-rapl:0", "package-0", 100)
    write(tmp_path, "intel-rapl:0:0", "core", 60)
    write(tmp_path, "intel-rapl:0:1", "dram", 10)
    write(tmp_path, "intel-rapl:1", "package-1", 200)
    write(tmp_path, "intel-rapl:2", "psys", 900)
    write(tmp_path, "intel-rapl-mmio:0", "package-0", 100)
    return tmp_path


def test_sockets_and_memory_are_counted_once(folder: Path) -> None:
    watch = EnergyWatch(folder)
    write(folder, "intel-rapl:0", "package-0", 130)
    write(folder, "intel-rapl:0:0", "core", 80)
    write(folder, "intel-rapl:0:1", "dram", 14)
    write(folder, "intel-rapl:1", "package-1", 250)
    write(folder, "intel-rapl:2", "psys", 999)
    assert watch.energy_j() == {"intel-rapl:0": 30, "intel-rapl:0:1": 4, "intel-rapl:1": 50}


def test_a_counter_that_goes_round_goes_on_each_time(folder: Path) -> None:
    watch = EnergyWatch(folder)
    for counted_j in (RANGE_UJ / 1e6 - 1, 20, RANGE_UJ / 1e6 - 1, 20):
        write(folder, "intel-rapl:0", "package-0", counted_j)
        used_j = watch.energy_j()["intel-rapl:0"]
    assert used_j == pytest.approx(2 * RANGE_UJ / 1e6 - 80)


def test_a_machine_without_counters_says_so(tmp_path: Path) -> None:
    assert EnergyWatch(tmp_path).energy_j() == {}
    assert "no counter of its processors' energy" in why_unreadable(tmp_path)


def test_counters_that_root_alone_may_read_come_with_the_command_that_helps(folder: Path) -> None:
    assert why_unreadable(folder) == ""
    (folder / "intel-rapl:1" / "energy_uj").unlink()
    assert f"chmod a+r {folder}/intel-rapl:*/energy_uj" in why_unreadable(folder)


def test_the_cpu_counts_from_when_it_begins_to_measure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rapl, "FOLDER", folder)
    device = open_device("cpu")
    assert device.info().no_energy == ""
    write(folder, "intel-rapl:1", "package-1", 300)
    device.start_measuring()
    write(folder, "intel-rapl:1", "package-1", 305)
    assert device.energy_j() == {"intel-rapl:0": 0, "intel-rapl:0:1": 0, "intel-rapl:1": 5}


def test_the_work_of_others_is_told_from_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stat").write_text("cpu  1000 0 0 9000 0 0 0 0 0 0\n")
    watch = ProcessorWatch(proc=tmp_path)
    assert watch.own_work() == 1  # nobody worked
    (tmp_path / "stat").write_text("cpu  1300 0 100 9000 0 0 0 0 0 0\n")
    own_s = watch._used_s + 3.0
    monkeypatch.setattr(watch, "_processor_time", lambda: own_s)
    assert watch.own_work() == pytest.approx(0.75)
