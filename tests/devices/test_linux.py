"""What Linux says of memory, of control groups, and of others on the processors; a process's own threads are not taken for others."""

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from autotune.devices import linux, open_device
from autotune.devices.linux import ProcessorWatch, kernel_oom_kills
from tests.devices.processes import CONTEXT, in_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")

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
    assert linux.memory_allowance(v2(tmp_path / "v2", unlimited)) is None
    unlimited = {"docker/1234/memory.limit_in_bytes": str(2**63 - 4096), "docker/1234/memory.usage_in_bytes": "1000"}
    assert linux.memory_allowance(v1(tmp_path / "v1", "memory", unlimited)) is None


def test_without_control_groups_there_is_no_allowance(tmp_path):
    assert linux.memory_allowance(tmp_path) is None
    assert linux.processor_quota(tmp_path) is None
    assert linux.kernel_oom_kills(tmp_path) == 0


def test_reclaimable_file_cache_is_free_in_v2(tmp_path):
    group = "job.slice/train.scope"
    files = {
        f"{group}/memory.max": str(8 * GIB),
        f"{group}/memory.current": str(6 * GIB),
        f"{group}/memory.stat": f"anon {2 * GIB}\nactive_file {GIB}\ninactive_file {2 * GIB}\nslab_reclaimable {GIB}",
    }
    assert linux.memory_allowance(v2(tmp_path, files)) == linux.MemoryAllowance(8 * GIB, 6 * GIB)


def test_reclaimable_file_cache_is_free_in_v1(tmp_path):
    files = {
        "docker/1234/memory.limit_in_bytes": str(8 * GIB),
        "docker/1234/memory.usage_in_bytes": str(6 * GIB),
        "docker/1234/memory.stat": f"total_active_file {GIB}\ntotal_inactive_file {2 * GIB}\ninactive_file 5",
    }
    assert linux.memory_allowance(v1(tmp_path, "memory", files)) == linux.MemoryAllowance(8 * GIB, 5 * GIB)


def test_a_mount_whose_name_is_not_utf_8_hides_no_limit(tmp_path):
    group = "job.slice/train.scope"
    root = v2(tmp_path, {f"{group}/memory.max": str(GIB), f"{group}/memory.current": "0"})
    mounts = root / "proc/self/mountinfo"
    mounts.write_bytes(b"28 23 0:25 / /mnt/f\xfcr rw,relatime - ext4 /dev/sda1 rw\n" + mounts.read_bytes())
    assert linux.memory_allowance(root) == linux.MemoryAllowance(GIB, GIB)


def test_the_tightest_of_all_ancestors_counts(tmp_path):
    files = {
        "job.slice/train.scope/memory.max": "max",
        "job.slice/train.scope/memory.current": str(GIB),
        "job.slice/memory.max": str(16 * GIB),
        "job.slice/memory.high": str(4 * GIB),  # above it the kernel throttles and reclaims
        "job.slice/memory.current": str(3 * GIB),
    }
    assert linux.memory_allowance(v2(tmp_path, files)) == linux.MemoryAllowance(4 * GIB, GIB)


def test_a_container_that_sees_only_its_own_part_of_the_tree(tmp_path):
    files = {"memory.limit_in_bytes": str(GIB), "memory.usage_in_bytes": "0"}
    expected = linux.MemoryAllowance(GIB, GIB)
    assert linux.memory_allowance(v1(tmp_path / "same", "memory", files, mount_root="/docker/1234")) == expected
    assert linux.memory_allowance(v1(tmp_path / "other", "memory", files, mount_root="/elsewhere")) == expected
    assert linux.memory_allowance(v1(tmp_path / "hidden", "memory", files)) == expected


def test_processor_quotas_of_both_versions(tmp_path):
    assert linux.processor_quota(v2(tmp_path / "2", {"job.slice/cpu.max": "150000 100000"})) == 1.5
    assert linux.processor_quota(v2(tmp_path / "none", {"job.slice/cpu.max": "max 100000"})) is None
    files = {"docker/1234/cpu.cfs_quota_us": "200000", "docker/1234/cpu.cfs_period_us": "100000"}
    assert linux.processor_quota(v1(tmp_path / "1", "cpu", files)) == 2
    files["docker/1234/cpu.cfs_quota_us"] = "-1"
    assert linux.processor_quota(v1(tmp_path / "1", "cpu", files)) is None


def test_more_threads_than_the_quota_allows_are_noted(monkeypatch):
    monkeypatch.setattr(linux, "processor_quota", lambda: 0.4)
    (note,) = open_device("cpu").info().notes
    assert "0.4 processors" in note
    assert "OMP_NUM_THREADS=1" in note


def test_kills_are_counted_in_both_versions(tmp_path):
    events = {"job.slice/train.scope/memory.events": "low 0\noom 3\noom_kill 2"}
    assert linux.kernel_oom_kills(v2(tmp_path / "2", events)) == 2
    control = {"docker/1234/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5"}
    assert linux.kernel_oom_kills(v1(tmp_path / "1", "memory", control)) == 5


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


def hog(core):
    os.sched_setaffinity(0, {core})
    while True:
        pass


def work(seconds):
    matrix = torch.ones(128, 128)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        matrix @ matrix


def contention_on_core(core, num_threads):
    """What is seen of others, and the share of the core that this process did not get, which it always wants."""
    os.sched_setaffinity(0, {core})
    device = open_device("cpu")
    work(0.1)  # the first products take what is no work
    device.start_measuring()
    began_s, used_s = time.monotonic(), time.process_time()
    threads = [threading.Thread(target=work, args=(0.6,)) for _ in range(num_threads - 1)]
    for thread in threads:
        thread.start()
    work(0.6)
    share = device.contention()
    lacked = 1 - (time.process_time() - used_s) / (time.monotonic() - began_s)
    for thread in threads:
        thread.join()
    return share, lacked


def test_an_equal_process_on_the_same_core_is_seen_and_nothing_but_what_others_take():
    core = min(os.sched_getaffinity(0))
    lone, lone_lacked = in_process(contention_on_core, core, 1)
    other = CONTEXT.Process(target=hog, args=(core,), daemon=True)
    other.start()
    try:
        crowded, crowded_lacked = in_process(contention_on_core, core, 1)
    finally:
        other.kill()
        other.join()
    assert 0.2 < crowded < 1
    assert crowded == pytest.approx(crowded_lacked, abs=0.1)
    assert lone == pytest.approx(lone_lacked, abs=0.1)  # whoever else is on this machine


def test_threads_that_wait_for_threads_of_their_own_process_are_not_contention():
    share, lacked = in_process(contention_on_core, min(os.sched_getaffinity(0)), 4)
    assert share < lacked + 0.1  # though each waits three quarters of the time


def test_a_thread_that_ended_does_not_disturb_the_measurement():
    device = open_device("cpu")
    before = threading.Thread(target=work, args=(0.05,))
    before.start()
    device.start_measuring()
    before.join()
    during = threading.Thread(target=work, args=(0.05,))
    during.start()
    during.join()
    assert 0 <= device.contention() <= 1


def write_ticks(proc, busy, stolen, cores=None):
    lines = [f"cpu{core} {busy} 0 0 1000 0 0 0 {stolen} 0 0" for core in cores or os.sched_getaffinity(0)]
    (proc / "stat").write_text("\n".join(["cpu 0 0 0 0 0 0 0 0 0 0", *lines]))


def test_time_that_a_hypervisor_gave_to_others_counts(tmp_path):
    write_ticks(tmp_path, busy=100, stolen=10)
    watch = ProcessorWatch(proc=tmp_path)
    write_ticks(tmp_path, busy=400, stolen=110)
    assert watch.share(1) == pytest.approx(0.25)


@pytest.mark.parametrize(("quota", "share"), [(None, 0.7), (4.0, 0.0)])
def test_what_threads_of_a_container_wait_for_its_own_limit_is_not_contention(tmp_path, monkeypatch, quota, share):
    """Eight threads on eight processors, of whose time it is granted four: each waits for half of it."""
    monkeypatch.setattr(linux, "processors", lambda: frozenset(range(8)))
    monkeypatch.setattr(linux, "processor_quota", lambda: quota)
    watch = ProcessorWatch(proc=tmp_path)
    watch._started_s = time.monotonic() - 10.0
    watch._thread_waits = lambda: dict.fromkeys(map(str, range(8)), 7_000_000_000)
    watch._processor_time = lambda: watch._used_s + (10.0 * 2.4 if quota is None else 10.0 * 4)
    assert watch.share(8) == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize(("others_s", "share"), [(0.2, 0.02), (2.0, 0.15)])
def test_a_thread_that_waits_for_its_own_data_workers_is_not_disturbed(tmp_path, monkeypatch, others_s, share):
    """In ten seconds it and its workers use 17 s of two processors. It waits for 2 s, mostly while its own workers run."""
    monkeypatch.setattr(linux, "processors", lambda: frozenset({0, 1}))
    per_s = os.sysconf("SC_CLK_TCK") / 2
    write_ticks(tmp_path, busy=0, stolen=0, cores=(0, 1))
    watch = ProcessorWatch(proc=tmp_path)
    write_ticks(tmp_path, busy=round((17 + others_s) * per_s), stolen=0, cores=(0, 1))
    watch._started_s = time.monotonic() - 10.0
    watch._thread_waits = lambda: {"1": 2_000_000_000}
    watch._processor_time = lambda: watch._used_s + 17.0
    assert watch.share(1) == pytest.approx(share, abs=0.005)


def test_where_the_kernel_tells_neither_peaks_nor_kinds_of_memory_what_is_resident_stands_for_them(monkeypatch):
    """As under gVisor."""
    status = "Name:\tpython\nVmSize:\t 9000 kB\nVmRSS:\t 3000 kB\nVmData:\t 5000 kB"
    monkeypatch.setattr(linux, "read", lambda path: status)
    found = linux.process_memory()
    assert (found.data_bytes, found.touched_bytes, found.peak_touched_bytes) == (5000 * 1024, 3000 * 1024, 3000 * 1024)
    assert (found.shared_bytes, found.peak_size_data_bytes) == (0, 5000 * 1024)


def test_a_kernel_that_counts_nothing_gives_zero(tmp_path):
    assert ProcessorWatch(proc=tmp_path).share(1) == 0
