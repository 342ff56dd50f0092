"""Tests marked `gpu` are skipped, with the reason, where there is no CUDA GPU; `avx2` takes a processor's arithmetic away.

Studies of the tests' own processes are not synced to the disk: a search commits some ten times a probe, at up to 20 ms each.
"""

from __future__ import annotations

import platform
import sqlite3

import pytest
from sqlalchemy import Engine, event


@event.listens_for(Engine, "connect")
def _leave_syncing_out(connection: object, record: object) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started from now on have AVX2 and no later arithmetic: their oneDNN emulates bf16 and fp16."""
    if platform.machine() != "x86_64":
        pytest.skip("AVX2 is x86's")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
