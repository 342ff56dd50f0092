"""When a process has ended is told by the kernel, or where it has no call for that by looking."""

import errno
import os
import subprocess
import sys
import time

import psutil
import pytest

from autotune.runners import ended
from autotune.runners.ended import has_ended, open_process

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")


def no_call(error):
    def pidfd_open(pid):
        raise OSError(error, os.strerror(error))

    return pidfd_open


@pytest.fixture(params=["kernel", "no function of Python's", "no call", "forbidden"])
def kind(request, monkeypatch):
    """Where this runs: with the kernel's call, on a Python without it, on an old kernel, in a container that forbids it."""
    if request.param == "no function of Python's":
        monkeypatch.delattr(os, "pidfd_open")
    elif request.param != "kernel":
        monkeypatch.setattr(os, "pidfd_open", no_call(errno.ENOSYS if request.param == "no call" else errno.EPERM))
    return request.param


def test_a_process_has_ended_once_it_was_killed_though_nobody_has_waited_for_it(kind):
    child = subprocess.Popen(["sleep", "60"])
    process = open_process(child.pid)
    try:
        assert not has_ended(process, 0.1) and not os.get_inheritable(process)
        child.kill()
        assert has_ended(process, 10.0)
        os.close(process)
        process = open_process(child.pid)
        assert has_ended(process, 10.0)
    finally:
        os.close(process)
        child.wait()
    with pytest.raises(ProcessLookupError):
        open_process(child.pid)


def test_a_process_is_looked_at_whatever_its_name():
    code = "open('/proc/self/comm', 'wb').write(b'f\\xfcr'); print('named', flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as child:
        child.stdout.readline()
        assert ended._began(child.pid) is not None
        child.kill()


def test_another_errors_cause_is_told(monkeypatch):
    monkeypatch.setattr(os, "pidfd_open", no_call(errno.EMFILE))
    with pytest.raises(OSError, match="Too many open files"):
        open_process(os.getpid())


def test_the_child_that_looks_ends_when_nobody_asks_any_more(monkeypatch):
    monkeypatch.setattr(os, "pidfd_open", no_call(errno.ENOSYS))
    before = set(psutil.Process().children())
    process = open_process(os.getpid())
    (looking,) = set(psutil.Process().children()) - before
    assert not has_ended(process, 0.1)
    os.close(process)
    assert os.waitpid(looking.pid, 0)[0] == looking.pid


def test_a_process_that_took_the_number_of_one_that_ended_is_not_taken_for_it(monkeypatch):
    monkeypatch.setattr(os, "pidfd_open", no_call(errno.ENOSYS))
    starts = iter(["1", "1"])
    monkeypatch.setattr(ended, "_began", lambda pid: next(starts, "2"))
    process = open_process(os.getpid())
    began_s = time.monotonic()
    assert has_ended(process, 10.0) and time.monotonic() - began_s < 10
    os.close(process)
    os.wait()
