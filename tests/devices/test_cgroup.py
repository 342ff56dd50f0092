"""Limits of control groups, read from trees of files as kernels and containers lay them out, and from a real one."""

import contextlib
import os
import signal
import sys
from pathlib import Path

import pytest

from autotune.devices import cgroup, open_device
from autotune.devices.oom import kernel_oom_kills
from tests.devices.processes import in_process

MIB, GIB = 2**20, 2**30
V2_MOUNT = "29 23 0:26 {root} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/{name} rw,relatime - cgroup cgroup rw,{name}"


def tree(root, paths, mounts, files):
    """Write `/proc/self/cgroup`, `/proc/self/mountinfo` and the groups' files below `root`."""
    written = {"proc/self/cgroup": "\n".join(paths), "proc/self/mountinfo": "\n".join(mounts), **files}
    for name, text in written.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def v2(root, files, *, path="/job.slice/train.scope", mount_root="/"):
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    return tree(root, [f"0::{path}"], [V2_MOUNT.format(root=mount_root)], files)


def v1(root, name, files, *, path="/docker/1234", mount_root="/"):
    files = {f"sys/fs/cgroup/{name}/{file}": text for file, text in files.items()}
    return tree(root, [f"4:{name}:{path}", "0::/"], [V1_MOUNT.format(root=mount_root, name=name)], files)


def test_without_a_limit_there_is_no_allowance(tmp_path):
    unlimited = {"job.slice/train.scope/memory.max": "max", "job.slice/train.scope/memory.current": "1000"}
    assert cgroup.memory_allowance(v2(tmp_path / "v2", unlimited)) is None
    unlimited = {"docker/1234/memory.limit_in_bytes": str(2**63 - 4096), "docker/1234/memory.usage_in_bytes": "1000"}
    assert cgroup.memory_allowance(v1(tmp_path / "v1", "memory", unlimited)) is None


def test_without_control_groups_there_is_no_allowance(tmp_path):
    assert cgroup.memory_allowance(tmp_path) is None
    assert cgroup.num_processors(tmp_path) is None
    assert cgroup.num_oom_kills(tmp_path) is None


def test_reclaimable_file_cache_is_free_in_v2(tmp_path):
    group = "job.slice/train.scope"
    files = {
        f"{group}/memory.max": str(8 * GIB),
        f"{group}/memory.current": str(6 * GIB),
        f"{group}/memory.stat": f"anon {2 * GIB}\nactive_file {GIB}\ninactive_file {2 * GIB}\nslab_reclaimable {GIB}",
    }
    assert cgroup.memory_allowance(v2(tmp_path, files)) == cgroup.MemoryAllowance(8 * GIB, 6 * GIB)


def test_reclaimable_file_cache_is_free_in_v1(tmp_path):
    files = {
        "docker/1234/memory.limit_in_bytes": str(8 * GIB),
        "docker/1234/memory.usage_in_bytes": str(6 * GIB),
        "docker/1234/memory.stat": f"total_active_file {GIB}\ntotal_inactive_file {2 * GIB}\ninactive_file 5",
    }
    assert cgroup.memory_allowance(v1(tmp_path, "memory", files)) == cgroup.MemoryAllowance(8 * GIB, 5 * GIB)


def test_the_tightest_of_all_ancestors_counts(tmp_path):
    files = {
        "job.slice/train.scope/memory.max": "max",
        "job.slice/train.scope/memory.current": str(GIB),
        "job.slice/memory.max": str(16 * GIB),
        "job.slice/memory.high": str(4 * GIB),  # above it the kernel throttles and reclaims
        "job.slice/memory.current": str(3 * GIB),
    }
    assert cgroup.memory_allowance(v2(tmp_path, files)) == cgroup.MemoryAllowance(4 * GIB, GIB)


def test_a_container_that_sees_only_its_own_part_of_the_tree(tmp_path):
    files = {"memory.limit_in_bytes": str(GIB), "memory.usage_in_bytes": "0"}
    expected = cgroup.MemoryAllowance(GIB, GIB)
    assert cgroup.memory_allowance(v1(tmp_path / "same", "memory", files, mount_root="/docker/1234")) == expected
    assert cgroup.memory_allowance(v1(tmp_path / "other", "memory", files, mount_root="/elsewhere")) == expected
    assert cgroup.memory_allowance(v1(tmp_path / "hidden", "memory", files)) == expected


def test_processor_quotas_of_both_versions(tmp_path):
    assert cgroup.num_processors(v2(tmp_path / "2", {"job.slice/cpu.max": "150000 100000"})) == 1.5
    assert cgroup.num_processors(v2(tmp_path / "none", {"job.slice/cpu.max": "max 100000"})) is None
    files = {"docker/1234/cpu.cfs_quota_us": "200000", "docker/1234/cpu.cfs_period_us": "100000"}
    assert cgroup.num_processors(v1(tmp_path / "1", "cpu", files)) == 2
    files["docker/1234/cpu.cfs_quota_us"] = "-1"
    assert cgroup.num_processors(v1(tmp_path / "1", "cpu", files)) is None


def test_more_threads_than_the_quota_allows_are_noted(monkeypatch):
    monkeypatch.setattr(cgroup, "num_processors", lambda: 0.4)
    (note,) = open_device("cpu").info().notes
    assert "0.4 processors" in note
    assert "OMP_NUM_THREADS=1" in note


def test_kills_are_counted_in_both_versions(tmp_path):
    events = {"job.slice/train.scope/memory.events": "low 0\noom 3\noom_kill 2"}
    assert cgroup.num_oom_kills(v2(tmp_path / "2", events)) == 2
    control = {"docker/1234/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5"}
    assert cgroup.num_oom_kills(v1(tmp_path / "1", "memory", control)) == 5


@pytest.fixture
def real_group():
    """A control group of 300 MiB, as (folder, its file of process ids)."""
    top = Path("/sys/fs/cgroup")
    group = (top / "memory" if (top / "memory").is_dir() else top) / f"autotune-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"needs the right to make a control group: {error}")
    try:
        try:
            limit = next(group / name for name in ("memory.limit_in_bytes", "memory.max") if (group / name).exists())
            limit.write_text(str(300 * MIB))
            with contextlib.suppress(OSError):  # without swap accounting there is no such file
                (group / "memory.swap.max").write_text("0")
        except (OSError, StopIteration) as error:
            pytest.skip(f"needs a control group that limits memory: {error}")
        yield group
    finally:
        group.rmdir()


def join_and_overflow(group):
    """In the group: the device's memory, and how a child ended that took too much."""
    (group / "cgroup.procs").write_text(str(os.getpid()))
    device = open_device("cpu")
    info, before = device.info(), kernel_oom_kills()
    if not (pid := os.fork()):
        bytearray(600 * MIB)[::4096] = bytes(600 * MIB // 4096)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    worker = RuntimeError(f"DataLoader worker (pid {pid}) is killed by signal: Killed. ")
    return info, os.waitstatus_to_exitcode(status), kernel_oom_kills() - before, device.is_out_of_memory(worker)


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
def test_a_real_group_limits_what_there_is_and_its_kills_are_seen(real_group):
    info, exit_code, num_kills, worker_is_oom = in_process(join_and_overflow, real_group)
    assert info.total_bytes == 300 * MIB
    assert 0 < info.free_bytes <= 300 * MIB
    assert exit_code == -signal.SIGKILL
    assert num_kills == 1
    assert worker_is_oom
