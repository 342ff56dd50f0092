"""Every notebook runs from a fresh kernel, and is kept with what it showed. What `inspect_study` shows: `test_notebook.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("nbclient")

from tests.notebooks import NOTEBOOKS, executed


def code_cells(name: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOKS[name].read_text())["cells"] if cell["cell_type"] == "code"]


def shown(notebook: Any, kind: str) -> str:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return " ".join(str(output["data"][kind]) for output in outputs if kind in output.get("data", {}))


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_kept_with_its_outputs_and_names_no_place_of_a_machine(name: str) -> None:
    cells = code_cells(name)
    assert all(cell["execution_count"] for cell in cells) and any(cell["outputs"] for cell in cells)
    outputs = json.dumps([cell["outputs"] for cell in cells])
    assert "/tmp" not in outputs and "/home" not in outputs and "Traceback" not in outputs


@pytest.mark.slow  # a minute; `test_notebook.py` runs a notebook too
def test_the_quick_start_finds_a_faster_config_and_trains_with_it() -> None:
    notebook = executed("quick_start")
    assert "Faster: " in shown(notebook, "text/html")
    assert "'amp': 'bf16'" in shown(notebook, "text/plain") and "'ok': " in shown(notebook, "text/plain")


@pytest.mark.slow
def test_strategies_are_compared_on_a_table() -> None:
    notebook = executed("compare_strategies")
    assert all(sampler in shown(notebook, "text/html") for sampler in ("cost-model", "tpe", "random"))
    assert shown(notebook, "image/png")


@pytest.mark.slow
def test_a_hugging_face_model_is_tuned_and_trained_by_its_trainer() -> None:
    notebook = executed("hugging_face")
    assert "per_device_train_batch_size" in shown(notebook, "text/plain")
