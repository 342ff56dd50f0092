"""A technique that another package brings: an entry point is all it takes, and no file of this package names it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.errors import ConfigError
from autotune.techniques import find_techniques

PACKAGE = Path(autotune.__file__).parent
NAME = "skip_naps"

# The model naps in every forward pass, so that shorter naps are sure to win, and by how much is clear after a few processes.
TECHNIQUE = '''
import os

from autotune.techniques import Phase, Support, Technique
from autotune.techniques.frameworks import At, Lines, Table


def wake_up(model):
    model.nap_s = AWAKE


AWAKE = 0.02


class SkipNaps(Technique):
    """Wakes the model up."""

    name = "skip_naps"
    summary = "no naps between layers: faster, no dreams"
    listed_choices = "`false` `true`"
    applies = "models that nap"
    off = False
    phase = Phase.MODEL
    keeps_random_masks = True
    likely = (True,)
    frameworks = {
        "transformers": Table({False: {"take_naps": True}, True: {"take_naps": False}}),
        "torch": Lines({At.MODEL: "wake_up(model)"}),
    }

    def support(self, setting):
        if not hasattr(setting.model, "nap_s"):
            return Support(choices=(False,), reason="the model does not nap")
        return Support(choices=(False, True))

    def apply(self, build, choice):
        wake_up(build.model)
        with open(os.environ["APPLIED"], "a") as file:
            file.write(f"{os.getpid()}\\n")

    def label(self, choice):
        return "wide awake" if choice else "naps"
'''

MODEL = """
import time

import torch
from torch import nn


class Napping(nn.Module):
    def __init__(self):
        super().__init__()
        self.nap_s = 0.06
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        time.sleep(self.nap_s)
        return self.head(x)


def build_model():
    return Napping()


def make_batch(batch_size):
    return torch.randn(batch_size, 16), torch.randint(4, (batch_size,))


GLOBAL_BATCH = 4
BASELINE = {"batch_size": 4}
"""


def install(folder: Path, distribution: str, entry: str, module: str, source: str) -> None:
    """What pip leaves behind for a package of one module with one entry point."""
    (folder / f"{module}.py").write_text(source)
    metadata = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[autotune.techniques]\n{entry}\n")


def run(*arguments: str, installed: Path, cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(installed), str(PACKAGE.parent)])
    environment = os.environ | {"PYTHONPATH": path, "APPLIED": str(cwd / "applied.txt")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, input=stdin
    )


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, subprocess.CompletedProcess[str]]:
    """The whole command line, over a space of this technique alone."""
    installed, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("work")
    install(installed, "naps-for-autotune", "skip_naps = naps:SkipNaps", "naps", TECHNIQUE)
    (folder / "model.py").write_text(MODEL)
    rest = [name for name in ("amp", "optimizer_impl", "batch_size", "channels_last") for name in ("--exclude", name)]
    search = ["-m", "autotune", "search", "model.py", "--device", "cpu", "--budget", "40s", "--study", "naps", *rest]
    done = run(*search, "--storage", "sqlite:///naps.db", installed=installed, cwd=folder)
    assert done.returncode == 0, done.stderr
    return installed, folder, done


ASKED = {
    "show": ["show"],
    "json": ["show", "--json"],
    "csv": ["show", "--csv"],
    **{f"to {name}": ["export", "--to", name] for name in ("json", "transformers", "torch")},
}
# every command in one process: an import of the package takes longer than they do
ASK = """
import contextlib, io, json, sys
from autotune.cli import main

told = {}
for name, (command, *options) in json.loads(sys.stdin.read()).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([command, "sqlite:///naps.db", "--study", "naps", *options]) == 0, name
    told[name] = out.getvalue()
from autotune.techniques import find_techniques
from autotune.techniques.__main__ import table
print(json.dumps({**told, "table": table(find_techniques())}))
"""


@pytest.fixture(scope="module")
def told(searched: tuple[Path, Path, Any]) -> dict[str, str]:
    """What the commands say of the study, in a process in which the technique is installed."""
    installed, folder, _ = searched
    done = run("-c", ASK, installed=installed, cwd=folder, stdin=json.dumps(ASKED))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_it_is_searched_and_wins(told: dict[str, str]) -> None:
    document = json.loads(told["json"])
    assert document["result"]["config"][NAME] is True
    assert document["result"]["verdict"] == "faster"
    assert document["result"]["baseline"]["config"][NAME] is False


def test_it_is_applied_in_the_probes_processes(searched: tuple[Path, Path, Any]) -> None:
    assert len(set((searched[1] / "applied.txt").read_text().split())) > 1


def test_it_is_named_in_the_report_and_in_the_explanation(
    searched: tuple[Path, Path, Any], told: dict[str, str]
) -> None:
    assert "wide awake" in searched[2].stderr
    for text in (searched[2].stdout, told["show"]):
        assert "naps -> wide awake" in text and f'"{NAME}": True' in text.replace("true", "True")


def test_its_gradients_are_compared_with_plain_training(told: dict[str, str]) -> None:
    (check,) = json.loads(told["json"])["result"]["checks"]
    assert check["passed"] and check["exact"] and f"{NAME}=True" in str(check["choice"])


def test_it_stands_in_the_table_of_probes(told: dict[str, str]) -> None:
    header, *rows = told["csv"].splitlines()
    assert NAME in header.split(",")
    assert {row.split(",")[header.split(",").index(NAME)] for row in rows} >= {"True", "False"}


def test_it_is_listed_with_the_packages_own(told: dict[str, str]) -> None:
    assert "| `skip_naps` | `false` `true` | no naps between layers: faster, no dreams | exact |" in told["table"]


def test_no_file_of_the_package_names_it() -> None:
    files = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".typed", ".md")]
    assert not [path for path in files if NAME in path.read_text()]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import missing_library", "ModuleNotFoundError: No module named 'missing_library'"),
        ("SkipNaps = 3", "is not a subclass of autotune.techniques.Technique"),
        (TECHNIQUE.replace("    off = False\n", ""), "SkipNaps does not say its off"),
        (TECHNIQUE.replace("def apply", "def use"), "abstract"),
        (TECHNIQUE.replace('"skip_naps"', '"amp"'), "the name 'amp' of a technique of naps-for-autotune is taken by autotune"),
        (TECHNIQUE.replace('"skip_naps"', '"batch_size"'), "is taken by autotune, for the batch"),
    ],
)  # fmt: skip
def test_one_that_is_broken_is_an_error_that_says_how_to_get_rid_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: str
) -> None:
    install(tmp_path, "naps-for-autotune", "skip_naps = naps:SkipNaps", "naps", source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "naps", raising=False)
    with pytest.raises(ConfigError) as caught:
        find_techniques.__wrapped__()
    assert expected in str(caught.value) and "`pip uninstall naps-for-autotune`" in str(caught.value)


def test_the_command_line_tells_of_a_broken_one_without_a_traceback(tmp_path: Path) -> None:
    install(tmp_path, "naps-for-autotune", "skip_naps = naps:SkipNaps", "naps", "import missing_library")
    (tmp_path / "model.py").write_text(MODEL)
    done = run("-m", "autotune", "search", "model.py", "--device", "cpu", installed=tmp_path, cwd=tmp_path)
    assert done.returncode == 2
    assert "`pip uninstall naps-for-autotune`" in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_it_is_exported_by_its_name_and_in_a_frameworks_words(told: dict[str, str]) -> None:
    assert json.loads(told["to json"])[NAME] is True
    assert json.loads(told["to transformers"])["take_naps"] is False
    assert "\nAWAKE = 0.02\n" in told["to torch"] and "\nwake_up(model)\n" in told["to torch"]
