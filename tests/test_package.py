"""What is published: wheel and sdist hold what they should, and work where nothing else is."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import autotune

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TINY = ROOT / "tests" / "models" / "tiny.py"
VERSIONS = ("3.12", "3.13", "3.14")  # the tests run with 3.11
USE = """
    from typing import assert_type

    import torch

    import autotune

    result = autotune.search("model.py", budget="2m", fix={"amp": "bf16"})
    assert_type(result.samples_per_s, float)
    task = autotune.Task(build_model=lambda: torch.nn.Linear(2, 2), make_batch=lambda n: torch.zeros(n, 2))
    assert_type(autotune.load_task("model.py"), autotune.Task)
    session = autotune.prepare(task, result.config)
    assert_type(session, autotune.Session)
    assert_type(session.step(next(iter(session.loader))), torch.Tensor)
    study = autotune.load_study("gpt.db")
    print(study.frame().head(), autotune.predict(task).to_dict(), autotune.explain(task).remarks)
"""


def run(*command: object, **options: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return str(done.stdout)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the sdist and of the wheel, which is built from what the sdist holds."""
    pytest.importorskip("build")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("*.whl"))


def _files_of_the_package() -> set[str]:
    files = (path.relative_to(ROOT).as_posix() for path in (ROOT / "autotune").rglob("*") if path.is_file())
    return {file for file in files if "__pycache__" not in file}


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == _files_of_the_package() and "autotune/py.typed" in names


def test_the_sdist_holds_what_the_wheel_is_built_from_and_no_tests(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    beside = {"CHANGELOG.md", "CITATION.cff", "LICENSE", "README.md", "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert names == _files_of_the_package() | beside


def test_the_metadata_is_what_an_index_shows(built: Path, wheel: Path) -> None:
    pytest.importorskip("twine")
    run(sys.executable, "-m", "twine", "check", "--strict", *built.iterdir())
    archive = zipfile.ZipFile(wheel)
    named = {name.rpartition("/")[2]: name for name in archive.namelist() if ".dist-info/" in name}
    told = email.message_from_bytes(archive.read(named["METADATA"]))
    assert (told["Name"], told["Version"]) == ("autotune-torch", autotune.__version__)
    assert told["License-Expression"] == "MIT" and told["Description-Content-Type"] == "text/markdown"
    assert "autotune = autotune.cli:main" in archive.read(named["entry_points.txt"]).decode()


def test_every_version_of_python_that_is_promised_is_named() -> None:
    assert PROJECT["requires-python"] == ">=3.11"
    named = {line.rpartition(" ")[2] for line in PROJECT["classifiers"] if re.search(r"Python :: 3\.", line)}
    assert named == {"3.11", *VERSIONS}


def test_changelog_and_citation_are_of_this_version() -> None:
    assert f"\n## {autotune.__version__} " in (ROOT / "CHANGELOG.md").read_text()
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == autotune.__version__


def test_workflows_and_templates_are_read_and_a_bug_report_asks_for_the_doctor() -> None:
    workflows = {path.name: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
    assert workflows.keys() == {"ci.yml", "release.yml"}
    assert workflows["release.yml"]["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    asked = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text())["body"]
    doctor = next(field for field in asked if "autotune doctor --json" in field["attributes"]["label"])
    assert doctor["validations"]["required"]


def test_the_top_level_is_what_it_was() -> None:
    tracked = run("git", "-C", ROOT, "ls-tree", "--name-only", "HEAD").split()
    folders = {name for name in tracked if (ROOT / name).is_dir()}
    assert folders == {".ci", ".github", "autotune", "notebooks", "studies", "tests"}


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The commands of an environment that has the wheel, and what it depends on as it is here."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    own = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    run(sys.executable, "-m", "pip", "--python", folder, "install", "--no-deps", "--no-index", wheel)
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    yield folder / "bin"
    shutil.rmtree(folder)


def _clean() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_the_installed_wheel_is_what_runs(environment: Path, tmp_path: Path) -> None:
    where = run(environment / "python", "-c", "import autotune; print(autotune.__file__)", cwd=tmp_path, env=_clean())
    assert where.startswith(str(environment.parent))
    told = run(environment / "autotune", "--version", cwd=tmp_path, env=_clean())
    assert told == f"autotune {autotune.__version__}\n"
    assert json.loads(run(environment / "autotune", "devices", "--json", cwd=tmp_path, env=_clean()))


@pytest.mark.slow
def test_what_uses_the_installed_package_is_typed(environment: Path, tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "use.py").write_text(textwrap.dedent(USE))
    options = ("--strict", "--follow-imports", "silent", "--cache-dir", tmp_path / "cache")
    run(sys.executable, "-m", "mypy", "--python-executable", environment / "python", *options, "use.py", cwd=tmp_path)


@pytest.mark.slow
def test_an_empty_environment_gets_what_it_needs_and_searches(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=True, symlinks=True)
    bin = tmp_path / "empty" / "bin"
    torch = f"torch=={sys.modules['torch'].__version__}" if "torch" in sys.modules else "torch"
    run(bin / "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", torch.partition("+")[0], wheel)
    shutil.copy(TINY, tmp_path / "model.py")
    assert run(bin / "autotune", "--version", cwd=tmp_path, env=_clean()) == f"autotune {autotune.__version__}\n"
    assert json.loads(run(bin / "autotune", "devices", "--json", cwd=tmp_path, env=_clean()))
    words = ("search", "model.py", "--device", "cpu", "--budget", "5m", "--trials", "3", "--json")
    assert json.loads(run(bin / "autotune", *words, cwd=tmp_path, env=_clean()))["config"]
    run(bin / "pip", "check")


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_newer_pythons_get_every_dependency_and_pass_the_type_checker(
    wheel: Path, version: str, tmp_path: Path
) -> None:
    target = ("--python-version", version, "--only-binary", ":all:", "--target", tmp_path)
    pinned = ("--constraint", ROOT / "constraints.txt")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", *target, *pinned, wheel)
    run(sys.executable, "-m", "mypy", "--python-version", version, "--cache-dir", tmp_path / "cache", cwd=ROOT)
