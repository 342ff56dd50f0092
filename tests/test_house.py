"""Who may know what: outside their own room, techniques are known by their protocol only."""

from __future__ import annotations

import ast
import graphlib
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import autotune
from autotune.devices import TYPES
from autotune.techniques import find_techniques

INSTALLED = find_techniques()

PACKAGE = Path(autotune.__file__).parent
TECHNIQUES = PACKAGE / "techniques"
PROTOCOL = {"base", "build", "frameworks"}  # files of the room that are no technique's
MOST_LINES = 70  # of a function
FILES = sorted(path for path in PACKAGE.rglob("*.py") if TECHNIQUES not in path.parents)


def strings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_every_file_of_the_package_is_looked_at() -> None:
    assert len(FILES) > 80


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_outside_the_techniques_names_one(path: Path) -> None:
    named = [(line, text) for line, text in strings(ast.parse(path.read_text())) if text in INSTALLED]
    assert not named


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_outside_the_techniques_imports_ones_file(path: Path) -> None:
    files = {f"autotune.techniques.{file.stem}" for file in TECHNIQUES.glob("*.py")}
    files -= {f"autotune.techniques.{name}" for name in (*PROTOCOL, "__init__", "__main__")}
    assert not [(line, module) for line, module in imports(ast.parse(path.read_text())) if module in files]


# What is called from outside (the API, the command line, a notebook, a trainer, an exporter), what a process begins with, and
# what opens a runner. Everybody else is passed the techniques: a search by command has others.
MAY_ASK_FOR_TECHNIQUES = {
    "api.py",
    "session.py",
    "notebook.py",
    "cli/commands.py",
    "cli/parser.py",
    "study/reading.py",
    "report/answer.py",
    "export/base.py",
    "export/lightning.py",
    "export/torch.py",
    "integrations/accelerate.py",
    "integrations/accelerator.py",
    "integrations/lightning.py",
    "integrations/loops.py",
    "integrations/transformers.py",
    "export/transformers.py",
    "integrations/base.py",
    "runners/worker.py",
    "probe/checks.py",
    "probe/inspection.py",
    "prediction/fakes.py",
    "prediction/job.py",
    "runners/command.py",
    "runners/runner.py",
    "tuning/opening.py",
}


def test_outside_the_entry_points_nobody_asks_for_the_installed_techniques() -> None:
    asked = "autotune.techniques.find_techniques"
    asking = [path for path in FILES if asked in [name for _, name in imports(ast.parse(path.read_text()))]]
    assert {str(path.relative_to(PACKAGE)) for path in asking} == MAY_ASK_FOR_TECHNIQUES


# whose comparisons are of something else, or who cannot ask: a choice, code that is exported, what runs without the package,
# and what lies below the devices
MAY_COMPARE_TYPES = {
    "techniques/optimizer_state.py",
    "techniques/device_prefetch.py",
    "techniques/activation_offload.py",
    "runners/hook.py",
    "randomness.py",
}


def compared(tree: ast.Module) -> Iterator[tuple[int, object]]:
    """The constants that are compared with something, alone or among others."""
    for node in ast.walk(tree):
        for operand in [node.left, *node.comparators] if isinstance(node, ast.Compare) else []:
            for each in getattr(operand, "elts", [operand]):
                yield node.lineno, getattr(each, "value", None)


@pytest.mark.parametrize(
    "path", [*FILES, *sorted(TECHNIQUES.rglob("*.py"))], ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_outside_the_devices_nobody_compares_types_of_devices(path: Path) -> None:
    named = [line for line, value in compared(ast.parse(path.read_text())) if value in (*TYPES,)]
    may = "devices" in path.parts or str(path.relative_to(PACKAGE)) in MAY_COMPARE_TYPES
    assert may or not named


MODULES = {
    ".".join(("autotune", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imported(module: str) -> set[str]:
    """The files that a file imports, inside functions, by strings and for a type checker, too. A package may name itself."""
    tree = ast.parse(MODULES[module].read_text())
    named = {text for _, text in strings(tree)} | {name for _, name in imports(tree)}
    parents = {module[:end] for end in range(len(module)) if module[end] == "."}
    return (named & MODULES.keys()) - {module} - parents


def test_files_import_each_other_in_no_circle() -> None:
    """`autotune/__init__` imports anything by its name when it is asked for it, and is left out."""
    try:
        tuple(
            graphlib.TopologicalSorter(
                {module: imported(module) for module in MODULES if module != "autotune"}
            ).static_order()
        )
    except graphlib.CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_no_string_imports_from_a_room_above() -> None:
    """The import linter reads import statements alone."""
    layers = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0][
        "layers"
    ]
    height = {room.strip(): -level for level, rooms in enumerate(layers) for room in rooms.split("|")}

    def room(module: str) -> str:
        return ".".join(module.split(".")[:2])

    up = [
        (module, text)
        for module in MODULES
        if module != "autotune"
        for _, text in strings(ast.parse(MODULES[module].read_text()))
        if text in MODULES and text != "autotune" and height[room(text)] > height[room(module)]
    ]
    assert not up


EXTRA = {
    "ray": "runners/ray.py",
    "postgres(ql)?": "study/backends/postgres.py",
    "psycopg": "study/backends/postgres.py",
}


@pytest.mark.parametrize(("engine", "file"), EXTRA.items())
def test_an_engine_that_is_an_extra_is_named_in_its_own_file_alone(engine: str, file: str) -> None:
    named = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        for tree in [ast.parse(path.read_text())]
        for _, text in (*strings(tree), *imports(tree))
        if re.search(rf"\b{engine}\b", text, re.IGNORECASE)
    }
    assert named == {file}


def test_importing_the_package_imports_no_engine_that_is_an_extra() -> None:
    code = "import sys, autotune.api, autotune.cli.parser; sys.exit(bool({'ray', 'psycopg'} & {*sys.modules}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_each_technique_has_a_file_a_test_and_nothing_else_in_it() -> None:
    for name, technique in INSTALLED.items():
        module = importlib.import_module(type(technique).__module__)
        assert Path(str(module.__file__)).stem == name
    tested = "".join(path.read_text() for path in (PACKAGE.parent / "tests" / "techniques").glob("test_*.py"))
    assert not [
        name for name in INSTALLED if f'"{name}"' not in tested and type(INSTALLED[name]).__name__ not in tested
    ]


def test_the_readmes_table_is_what_the_techniques_say() -> None:
    from autotune.techniques.__main__ import table

    assert table(INSTALLED) in (PACKAGE.parent / "README.md").read_text()


def test_the_process_that_searches_imports_no_torch() -> None:
    """It would take seconds of the two processors on which the processes of the probes import it, too."""
    rooms = "autotune.api, autotune.tuning.search, autotune.runners.local, autotune.export, autotune.report.answer"
    code = f"import sys, {rooms}; from autotune.techniques import find_techniques as f; sys.exit('torch' in sys.modules or not f())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_importing_it_draws_no_random_number() -> None:
    """A script that seeds first and imports then trains on the same samples as before."""
    code = "import random, sys; drawn = random.getstate(); import autotune.api; sys.exit(drawn != random.getstate())"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_whole_search_runs_without_torch(tmp_path: Path) -> None:
    gpt = PACKAGE.parent / "studies" / "gpt"
    options = ["--replay", str(gpt / "cpu.csv"), "--budget", "15s", "--storage", f"sqlite:///{tmp_path / 'gpt.db'}"]
    code = f"from autotune.cli import main; main({['search', str(gpt / 'model.py'), *options]!r})"
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; sys.exit('torch' in sys.modules)"],
        capture_output=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr.decode()


def test_no_function_is_longer_than_a_reader_holds_in_mind() -> None:
    functions = [
        (str(path.relative_to(PACKAGE)), node.name)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= MOST_LINES
    ]
    assert not functions


def test_no_text_leaves_the_plural_to_its_reader() -> None:
    """`units.plural` writes `1 round` and `2 rounds`."""
    texts = [text for path in PACKAGE.rglob("*.py") for _, text in strings(ast.parse(path.read_text()))]
    assert not [text for text in texts if re.search(r"[a-z]\(e?s\)(?!\))", text)]
