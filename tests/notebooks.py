"""Executes the notebooks. `python -m tests.notebooks [NAME...]` writes their outputs into them."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import nbclient
import nbformat

import autotune
from autotune.runners.replay import ReplayRunner

ROOT = Path(__file__).parents[1]
NOTEBOOKS = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}


def executed(name: str, environment: Mapping[str, str] | None = None) -> Any:
    """A notebook with its outputs, from a fresh kernel."""
    notebook = nbformat.read(NOTEBOOKS[name], as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(ROOT / "notebooks")}},
    )
    with patch.dict(os.environ, environment or {}):
        client.execute()
    return notebook


def keep(name: str) -> None:
    """Write a notebook with its outputs, without what depends on the place: warnings, and the text of what has HTML."""
    with tempfile.TemporaryDirectory() as folder:
        study = str(Path(folder) / "gpt.db")
        gpt = ROOT / "studies" / "gpt"
        if name == "inspect_study":
            autotune.search(
                gpt / "model.py", runner=ReplayRunner(gpt / "cpu.csv"), budget="4m", storage=study, study="gpt"
            )
        notebook = executed(name, {"AUTOTUNE_STUDY": study})
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "text/html" in output.get("data", {}):
                    output.data.pop("text/plain", None)
    notebook.metadata.language_info = {"name": "python"}
    temporary = rf"{re.escape(tempfile.gettempdir())}/tmp[^/]+/"
    NOTEBOOKS[name].write_text(re.sub(f"{temporary}|{re.escape(str(ROOT))}/", "", nbformat.writes(notebook)) + "\n")


if __name__ == "__main__":
    for name in sys.argv[1:] or NOTEBOOKS:
        keep(name)
