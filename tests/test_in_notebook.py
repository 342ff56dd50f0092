"""In a notebook, results and studies show themselves as HTML."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.sample_study import write_study

pytest.importorskip("IPython")
CELLS = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
import autotune
study = autotune.load_study({file!r})
for shown in (study, study.result):
    html = shell.display_formatter.format(shown)[0]["text/html"]
    print('class="autotune"' in html, "Faster: 1.7" in html)
"""


def test_a_study_and_its_result_show_themselves(tmp_path: Path) -> None:
    cells = CELLS.format(file=str(write_study(tmp_path / "gpt.db")))
    printed = subprocess.run([sys.executable, "-c", cells], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines() == ["True True"] * 2
