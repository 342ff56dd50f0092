"""Checks in processes of their own, each killed when it takes too long, and facts of the machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import platform
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from autotune.devices import open_device
from autotune.devices.selftest import TESTS, Facts
from autotune.errors import in_one_line
from autotune.units import format_seconds

CHECK_TIMEOUT_S = 20.0
RELEASE_S = 5.0  # until a killed process must have ended, and its memory be back
STUCK = {"failure": "the check's process did not end when it was killed: it is stuck in the driver"}


def in_process(test: str, device: str) -> Facts:
    """The facts of a test, in a process that is killed when it takes too long."""
    with _start(test, device) as (process, receiving):
        facts = _receive(process, receiving)
    return STUCK if process.is_alive() else facts


@contextlib.contextmanager
def _start(test: str, device: str) -> Iterator[tuple[Any, Connection]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "autotune.devices.selftest"])
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sending, test, device))
    process.start()
    sending.close()
    try:
        yield process, receiving
    finally:
        process.kill()
        process.join(RELEASE_S)
        receiving.close()


def _receive(process: Any, receiving: Connection) -> Facts:
    if not receiving.poll(CHECK_TIMEOUT_S):
        return {"failure": f"the check did not end within {format_seconds(CHECK_TIMEOUT_S)}"}
    try:
        facts: Facts = receiving.recv()
    except EOFError:
        process.join(1)
        return {"failure": f"the check's process ended with status {process.exitcode}"}
    return facts


def _run(sending: Connection, test: str, device: str) -> None:
    try:
        facts = TESTS[test](device)
        kept = facts.pop("keep", None)
    except BaseException as error:
        facts, kept = {"failure": in_one_line(error)}, None
    sending.send(facts)
    while kept is not None:
        time.sleep(60)


def kill_and_watch(name: str) -> Facts:
    """Kill a process that holds memory of the device, and see when that is back."""
    device = open_device(name)

    def used() -> float | None:
        return device.telemetry().values.get("used_bytes")

    if used() is None:
        return {"why": "nothing here tells how much of the device's memory is in use"}
    with _start("hold", name) as (process, receiving):
        facts = _receive(process, receiving)
        if "failure" in facts:
            return facts
        while_bytes = used() or 0.0
        facts |= {"gpu": device.capabilities.own_memory, "while_bytes": while_bytes}
        started = time.monotonic()
        process.kill()
        process.join(RELEASE_S)
        if process.is_alive():
            return STUCK
        while (after_bytes := used() or 0.0) > while_bytes - facts["held_bytes"] / 2:
            if time.monotonic() > started + RELEASE_S:
                break
            time.sleep(0.02)
    return {**facts, "after_bytes": after_bytes, "released_s": time.monotonic() - started}


def compiler(device: str) -> Facts:
    """What is missing of what `torch.compile` needs."""
    return {"missing": open_device(device).why_not_compiled()}


def study() -> Facts:
    """Write a database with a lock where studies go by default: below the working directory."""
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".autotune-", dir=Path.cwd()) as folder,
            contextlib.closing(sqlite3.connect(Path(folder) / "study.db", timeout=1)) as database,
        ):
            database.execute("create table probe (number integer)")
            database.commit()
    except (OSError, sqlite3.Error) as error:
        return {"error": in_one_line(error)}
    return {"error": ""}


def machine(kind: str) -> Facts:
    """The kind of the device and of the processor."""
    return {"device_kind": kind, "processor": platform.machine().lower()}
