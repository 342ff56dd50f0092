"""Tests marked `gpu` are skipped, with the reason, where there is no CUDA GPU, and else run one at a time.

`avx2` takes a processor's arithmetic away. Studies of the tests' own processes are not synced to the disk: a search commits some ten
times a probe, at up to 20 ms each.
"""

from __future__ import annotations

import contextlib
import platform
import sqlite3
from collections.abc import Iterator

import pytest
from filelock import FileLock
from sqlalchemy import Engine, event

GPU_TIMEOUT_S = 600  # compiling takes minutes


@event.listens_for(Engine, "connect")
def _leave_syncing_out(connection: object, record: object) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    for item in marked:
        item.add_marker(pytest.mark.timeout(GPU_TIMEOUT_S, func_only=True))  # not while it waits for its turn
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture(autouse=True)
def alone_on_the_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lets no test of another of pytest's processes use the GPU meanwhile."""
    waits = contextlib.nullcontext()
    if request.node.get_closest_marker("gpu"):
        waits = FileLock(tmp_path_factory.getbasetemp().parent / "gpu.lock")
    with waits:
        yield


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started from now on have AVX2 and no later arithmetic: their oneDNN emulates bf16 and fp16."""
    if platform.machine() != "x86_64":
        pytest.skip("AVX2 is x86's")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
