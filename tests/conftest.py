"""What all tests share.

No test sees anything of the user's: each runs in an empty folder, below a project that asks for nothing, and without the variables
and settings that change what the package or the libraries under it do.

Tests marked `gpu` are skipped, with the reason, where there is no CUDA GPU, and else run one at a time; over the played cards of
`tests/driver` each worker has books of its own, and tests marked `values` are skipped. `avx2` takes a processor's arithmetic away;
`measured_once` keeps what a search measured of the machine; `short_play_off` lets a play-off end after its fewest rounds, as
`tests/short_play_off.py` does for the command line. Studies of the tests' own processes are not synced to the disk: a search
commits some ten times a probe, at up to 20 ms each.
"""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock
from sqlalchemy import Engine, event

STATE = "PLAYED_STATE"
if os.environ.get(STATE) and (worker := os.environ.get("PYTEST_XDIST_WORKER")):
    os.environ[STATE] += f".{worker}"  # read when torch loads the driver
GPU_TIMEOUT_S = 600  # compiling takes minutes
USERS = (
    "ACCELERATE_", "AUTOTUNE_", "FSDP_", "MLFLOW_", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "WANDB_",
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE",  # a launcher's
    "COLUMNS", "FORCE_COLOR", "LINES", "NO_COLOR", "TTY_",  # how wide and how colourful output is
)  # fmt: skip
SETTINGS = {"HF_HOME": "hugging_face", "IPYTHONDIR": "ipython", "JUPYTER_CONFIG_DIR": "jupyter"}  # folders of settings


@event.listens_for(Engine, "connect")
def _leave_syncing_out(connection: object, record: object) -> None:
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA synchronous = OFF")


@pytest.fixture(scope="session", autouse=True)
def _let_data_workers_go() -> None:
    """Wait half a second, and not five, for a data worker whose loader the garbage collector ends: such a one does not hear of it."""
    from torch.utils.data import _utils

    _utils.MP_STATUS_CHECK_INTERVAL = 0.5


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    for item in marked:
        item.add_marker(pytest.mark.timeout(GPU_TIMEOUT_S, func_only=True))  # not while it waits for its turn
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        elif STATE in os.environ and item.get_closest_marker("values"):
            item.add_marker(pytest.mark.skip(reason="a played card computes no values and has no speed"))
        elif STATE not in os.environ and item.get_closest_marker("played"):
            item.add_marker(pytest.mark.skip(reason="needs the played cards of tests/driver: `make test-cuda`"))


@pytest.fixture(scope="session", autouse=True)
def nothing_of_the_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Takes away the user's variables, settings and project for every process of the tests.

    The home folder stays: pip and git, which build and list the package, are set up there.
    """
    base = tmp_path_factory.getbasetemp()
    (base / "pyproject.toml").touch()  # nobody looks for one above it
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(USERS)]:
            patch.delenv(name)
        for name, folder in SETTINGS.items():
            patch.setenv(name, str(base / folder))
        yield


@pytest.fixture(scope="module", autouse=True)
def an_empty_folder_of_its_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a module's own fixtures leave in the working folder is that module's."""
    with contextlib.chdir(tmp_path_factory.mktemp("module")):
        yield


@pytest.fixture(scope="module", autouse=True)
def only_its_modules_garbage() -> None:
    """Collects no garbage among what was imported before: the package collects after each attempt, and torch alone is 0.3 s of it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def an_empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Studies, traces and calibrations are kept below the working folder: each test begins without any."""
    with contextlib.chdir(tmp_path_factory.mktemp("here")):
        yield


@pytest.fixture(autouse=True)
def alone_on_the_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lets no test of another of pytest's processes use the GPU meanwhile."""
    waits = contextlib.nullcontext()
    if request.node.get_closest_marker("gpu") and STATE not in os.environ:
        waits = FileLock(tmp_path_factory.getbasetemp().parent / "gpu.lock")
    with waits:
        yield


@pytest.fixture
def measured_once(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Lets searches that keep their studies in `tmp_path` measure this machine, which takes 3 s, only where no test before did."""
    kept = tmp_path_factory.getbasetemp() / "calibrations"
    folders = [tmp_path / ".calibration", tmp_path / "studies" / ".calibration"]
    for folder in folders if kept.exists() else ():
        shutil.copytree(kept, folder)
    yield
    for folder in folders:
        if folder.exists():  # what was measured beside other work is not kept
            shutil.copytree(folder, kept, dirs_exist_ok=True)


@pytest.fixture
def short_play_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches of this process end their play-off after its fewest rounds, however noisy the machine."""
    from autotune.tuning import playoff

    monkeypatch.setattr(playoff, "MAX_ROUNDS", playoff.MIN_ROUNDS)


@pytest.fixture
def avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started from now on have AVX2 and no later arithmetic: their oneDNN emulates bf16 and fp16."""
    if platform.machine() != "x86_64":
        pytest.skip("AVX2 is x86's")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
