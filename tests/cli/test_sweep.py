"""`autotune sweep`: a table on disk, a line a probe on stderr, and clear refusals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli import main
from autotune.runners import table
from autotune.techniques import find_techniques

TINY = Path(__file__).parent.parent / "models" / "tiny.py"
SMALL = (
    "--grid",
    "batch_size=4",
    "--grid",
    "checkpoint_segments=0",
    "--grid",
    "optimizer_impl=default",
    "--grid",
    "amp=off,bf16",
    "--grid",
    "keep_heap=false",
    "--grid",
    "inplace_activations=false",
    "--include",  # a processor may only emulate bf16
    "amp",
)
SWEEP = ("sweep", str(TINY), "--device", "cpu", "--out", "tiny.csv")


def test_a_sweep_writes_its_table_and_says_what_is_in_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autotune", *SWEEP, *SMALL, "--max-repeats", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tiny.csv: 2 configs, 2 probes; 2 ran, 0 of them known to within 3.0%")
    assert len(done.stderr.splitlines()) == 2 and "round 1,    0 left: batch 4 x12" in done.stderr
    assert len(table.read(tmp_path / "tiny.csv", find_techniques()).rows) == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--grid", "ampp=off"), "did you mean amp"),
        (("--grid", "amp"), "--grid: 'amp' is not NAME=CHOICE"),
        (("--grid", "amp=fp8"), "'fp8' is not a choice of amp"),
        (("--interval", "300%"), "not a share"),
    ],
)
def test_bad_options_are_refused_with_the_next_step(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SWEEP, *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == "" and expected in told.err and "Traceback" not in told.err


def test_a_foreign_file_is_refused_and_left_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    table_of_prices = Path("tiny.csv")
    table_of_prices.write_text("name,price\ntea,3\n")
    assert main([*SWEEP, *SMALL]) == 2
    assert table_of_prices.read_text() == "name,price\ntea,3\n"
    assert "is not a recorded table: it begins with 'name,price'" in capsys.readouterr().err
