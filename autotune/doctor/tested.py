"""The machines on which the package's own tests have run: what a search meets elsewhere has not been seen before."""

from __future__ import annotations

import platform

from autotune.devices.selftest import Facts
from autotune.doctor.verdicts import State, Verdict

DEVICES, PROCESSORS = {"cpu"}, {"x86_64", "amd64"}


def tested_facts(kind: str) -> Facts:
    """The kind of the device and of the processor."""
    return {"device_kind": kind, "processor": platform.machine().lower()}


def judge_tested(facts: Facts) -> Verdict:
    """Machines of this kind have run the package's own tests."""
    if facts["device_kind"] not in DEVICES:
        found = (
            "no real GPU has run the package's tests; torch's CUDA build has, over GPUs that the tests play: errors, "
            "neighbours and memory are proven there, values, speed and the workspaces of cuDNN are not"
        )
        return State.UNAVAILABLE, found, "the lines above are the proof for this GPU: please report what differs"
    if facts["processor"] not in PROCESSORS:
        found = f"the package's tests have not run on {facts['processor']}, on x86-64 processors alone"
        return State.UNAVAILABLE, found, "the lines above are the proof for this machine: please report what differs"
    return State.OK, "the package's tests run on x86-64 processors with and without bf16 arithmetic", ""
