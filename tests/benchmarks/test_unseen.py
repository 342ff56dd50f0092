"""The unseen tasks train as they are, and the package does not know them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autotune
from tests.new_threads import count_new_threads

UNSEEN = Path(__file__).parent / "unseen"
PACKAGE = Path(autotune.__file__).parent
NAMES = ("cell_vae", "click_cross", "demand_lstm", "scan_unet", "speech_ctc", "tile_resnet")


def losses_of_one_step(name: str) -> tuple[float, float]:
    """The loss of a fresh session's first step, and of its next one on the same batch."""
    task = autotune.load_task(UNSEEN / name / "model.py")
    torch.manual_seed(0)
    session = autotune.prepare(task, task.baseline or {}, device="cpu")
    batch = next(iter(session.loader))
    return float(session.step(batch)), float(session.step(batch))


def test_every_folder_is_a_task_of_the_list() -> None:
    assert tuple(sorted(path.parent.name for path in UNSEEN.glob("*/model.py"))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_baseline_takes_whole_steps_of_the_global_batch(name: str) -> None:
    task = autotune.load_task(UNSEEN / name / "model.py")
    assert task.global_batch is not None and task.baseline is not None
    assert task.global_batch % int(task.baseline["batch_size"]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_finite_changes_the_loss_and_is_the_same_again(name: str) -> None:
    first, second = losses_of_one_step(name)
    assert torch.tensor([first, second]).isfinite().all() and first != second
    assert losses_of_one_step(name)[0] == pytest.approx(first, rel=1e-5)


def test_importing_a_task_starts_no_threads() -> None:
    done = count_new_threads(UNSEEN / name / "model.py" for name in NAMES)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NAMES)
def test_no_file_of_the_package_names_a_task(name: str) -> None:
    naming = [
        path for path in PACKAGE.rglob("*") if path.suffix != ".pyc" and path.is_file() and name in path.read_text()
    ]
    assert naming == []
