"""Runs a function in a fresh process that has torch imported: its memory limit, peak and affinity are its own."""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "numpy"])


def in_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process of its own. What it refers to goes along as a copy; the result must be picklable."""
    receiving, sending = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_run, args=(sending, cloudpickle.dumps((function, arguments))))
    process.start()
    sending.close()
    try:
        failed, result = receiving.recv()
    except EOFError:
        process.join()
        code = process.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        raise AssertionError(f"the process ended with {how}") from None
    process.join()
    assert not failed, result
    return result


def _run(connection: Connection, work: bytes) -> None:
    import torch

    multiprocessing.set_start_method(
        "fork", force=True
    )  # of data-loading workers; else they get a fork server of their own
    torch.set_num_threads(1)
    try:
        function, arguments = cloudpickle.loads(work)
        message = (False, function(*arguments))
    except BaseException:
        message = (True, traceback.format_exc())
    connection.send(message)
