"""`autotune explain`: where memory and time go, and what to do about it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from autotune import cli
from autotune.records.explanation import LOSS, Explanation
from autotune.report import plots
from autotune.report.explanation import explanation_sections
from autotune.report.terminal import as_text
from autotune.techniques import find_techniques

VARIANTS = Path(__file__).parent.parent / "models" / "variants.py"
BIG_HEAD = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8000, 32)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(3)))
        self.head = nn.Linear(32, 8000)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))

def build_model():
    return Model()

def make_batch(batch_size):
    tokens = torch.randint(8000, (batch_size, 8))
    return tokens, tokens

def training_step(model, batch):
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

GLOBAL_BATCH = 128
BASELINE = {"batch_size": 64}
"""
NEEDS_VALUES = """
import torch
from torch import nn

def build_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

def make_batch(batch_size):
    return torch.randn(batch_size, 64), torch.randint(10, (batch_size,))

def training_step(model, batch):
    x, y = batch
    return nn.functional.cross_entropy(model(x[y.nonzero()[:, 0]]), y[y.nonzero()[:, 0]])
"""
NORMALISED = """
import torch
from torch import nn

BASELINE = {"batch_size": 512}

def build_model():
    return nn.Sequential(nn.Linear(16, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 4))

def make_batch(batch_size):
    return torch.randn(batch_size, 16), torch.randint(4, (batch_size,))
"""


def explain(folder: Path, source: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "model.py").write_text(source)
    main = (
        "import sys; from autotune.cli import main; code = main(sys.argv[1:]); sys.exit('torch' in sys.modules or code)"
    )
    command = [sys.executable, "-c", main, "explain", "model.py", "--device", "cpu", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=115)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("big_head")


@pytest.fixture(scope="module")
def explained(folder: Path) -> Explanation:
    done = explain(folder, BIG_HEAD, "--json", "--picture", "memory.png")
    assert done.returncode == 0, done.stderr
    found = Explanation.from_dict(json.loads(done.stdout))
    assert Explanation.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    return found


def test_the_parts_sum_to_the_allocators_peak(explained: Explanation) -> None:
    memory, times, probe = explained.memory, explained.times, explained.probe
    assert memory is not None and times is not None and probe is not None and probe.measurement is not None
    assert sum(memory.kinds().values()) == sum(module.total_bytes for module in memory.modules) == memory.peak_bytes
    assert memory.peak_bytes == pytest.approx(times.allocated_bytes, rel=0.05)
    assert max(sum(moment.held_bytes) for moment in memory.timeline) == memory.peak_bytes
    assert explained.beside_bytes + times.allocated_bytes == probe.measurement.peak_bytes


def test_the_modules_times_sum_to_the_probes_phases(explained: Explanation) -> None:
    assert explained.times is not None and explained.probe is not None and explained.probe.measurement is not None
    for phase in ("forward", "backward"):
        seconds = sum(phases.get(phase, 0.0) for phases in explained.times.seconds.values())
        assert seconds == pytest.approx(explained.probe.measurement.phases_s[phase])
    assert {"embedding", "head", "blocks.1.2", LOSS} <= explained.times.seconds.keys()


def test_a_big_head_is_named_with_what_saves_it(explained: Explanation) -> None:
    remark = explained.remarks[0]
    assert "`head`" in remark.part and remark.share > 0.5
    advice = next(one for one in explained.advice if one.label == remark.remedy)
    assert advice.saves_bytes == remark.saves_bytes > 0
    text = as_text(explanation_sections(explained, find_techniques()), 100)
    assert "last layer `head`" in text and "blocks.0-2, each of 3" in text


def test_the_picture_is_drawn(explained: Explanation, folder: Path) -> None:
    assert (folder / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_the_bars_of_the_picture_begin_at_zero(explained: Explanation) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    assert explained.memory is not None
    ax = plots.bars(explained.memory, figure.subplots())
    assert ax.get_xlim()[0] == 0 and ax.get_xticks()[0] == 0


def test_what_is_not_predicted_is_named_before_the_reason(explained: Explanation) -> None:
    told = replace(explained, not_predicted={"fp16": "it is emulated"})
    assert "fp16  not predicted: it is emulated" in as_text(explanation_sections(told, find_techniques()), 100)


def test_a_model_that_cannot_be_traced_is_explained_by_what_was_measured(tmp_path: Path) -> None:
    done = explain(tmp_path, NEEDS_VALUES)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "not traced: what aten.nonzero.default returns depends on the values of a tensor" in said
    assert "a short real run" in said and "share of the time" in said


def test_where_nothing_can_be_written_it_explains_all_the_same_and_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "studies").write_text("no folder")
    done = explain(tmp_path, NEEDS_VALUES)
    assert done.returncode == 0 and "a short real run" in " ".join(done.stdout.split()), done.stderr
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert notes == ["note: nothing is kept, as studies cannot be written: Not a directory"]
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"studies", "model.py"}


@pytest.mark.parametrize(
    ("picture", "said"),
    [("memory.bmp", "expected a file that ends in .png, .svg, .pdf"), ("nowhere/memory.png", "cannot be written")],
)
def test_a_picture_that_cannot_be_drawn_is_refused_at_once(
    picture: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["explain", "no_such_model.py", "--picture", picture]) == 2
    assert f"--picture {picture}" in (told := capsys.readouterr().err) and said in told


@pytest.mark.slow  # `test_rankings.py` predicts another training
def test_another_training_is_explained_by_itself_and_blocks_in_a_block_are_one_row(tmp_path: Path) -> None:
    done = explain(tmp_path, VARIANTS.read_text(), "--config", '{"variant": "small"}', "--json")
    assert done.returncode == 0, done.stderr
    found = Explanation.from_dict(json.loads(done.stdout))
    assert found.memory is not None
    small = 64 * 32 + 32 + 3 * (32 * 32 + 32) + 32 * 10 + 10
    assert found.memory.kinds()["gradients"] == pytest.approx(4 * small, rel=0.05)
    assert "1.0-2, each of 3" in as_text(explanation_sections(found, find_techniques()), 100)


@pytest.mark.slow  # a process, for one line
def test_half_a_batch_is_marked_where_it_trains_something_else(tmp_path: Path) -> None:
    done = explain(tmp_path, NORMALISED)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "batch 256 x2; trains something else" in said
    assert "no global batch is given, so every step takes one batch" in said
