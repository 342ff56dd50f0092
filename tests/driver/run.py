"""Where the built driver lies, a state file for a command, and the environment of a process over the driver."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.driver.build import BuildError, build
from tests.driver.cards import Card, environment
from tests.driver.played import Played

ROOT = Path(__file__).parent.parent.parent
_OF_THE_DRIVER = ("PLAYED_", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "PYTORCH_NVML_BASED_CUDA_CHECK")


def libraries() -> dict[str, str]:
    """The variables with which a process loads the driver for this Python's torch, which is not imported.

    Raises:
        BuildError: there is no torch, it is not built for CUDA 13, or a program that building needs is missing.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise BuildError(f"{sys.executable} has no torch: install its CUDA build")
    folder = str(build(Path(found.origin).parent, Path(sys.prefix, "driver")))
    others = [path for path in os.environ.get("LD_LIBRARY_PATH", "").split(":") if path and path != folder]
    return {"LD_LIBRARY_PATH": ":".join([folder, *others]), "TRITON_LIBCUDA_PATH": folder}


def variables(state: Path, card: Card, num_cards: int = 1, **settings: object) -> dict[str, str]:
    """The whole environment of a process that sees these cards; `settings` as in `environment`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_OF_THE_DRIVER)}
    played = environment(card, num_cards, **settings)
    return {**inherited, **libraries(), **played, "PLAYED_STATE": str(state), "PYTHONPATH": str(ROOT)}


def open_books(environment: dict[str, str]) -> Played:
    """A hand on the cards of `variables`, once the driver itself has begun their books with the neighbours that these name."""
    subprocess.run([sys.executable, "-c", "import torch; torch.cuda.device_count()"], env=environment, check=False)
    return Played(Path(environment["PLAYED_STATE"]))


@contextlib.contextmanager
def played_state() -> Iterator[Path]:
    """The state file that PLAYED_STATE names, or else a fresh one, deleted in the end with what ranks left beside it."""
    if given := os.environ.get("PLAYED_STATE"):
        yield Path(given)
        return
    shared_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="played.", dir=shared_memory if shared_memory.is_dir() else None) as folder:
        yield Path(folder, "books")
