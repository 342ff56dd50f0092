"""`[tool.autotune]` in `pyproject.toml` gives options to every command, below the flags; no output replaces a file that is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from autotune import api
from autotune.cli import commands, main
from autotune.cli.files import read_project
from autotune.cli.files import write as write_output
from autotune.errors import ConfigError
from tests.report.sample_study import answer, but, write_study

FULL = """
[tool.autotune]
budget = "2m"
headroom = 0.1
memory-limit = "12GiB"
trials = 30
include = ["compile", "loss_chunks"]
fix = { amp = "bf16", num_workers = 2 }
"""


def write(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_text(text)
    return folder


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What searches were asked."""
    asked: list[dict[str, Any]] = []

    def search(model: str, listeners: Any, **options: Any) -> Any:
        asked.append(options)
        return answer("sqlite:///gpt.db")

    monkeypatch.setattr(api, "search", search)
    return asked


def test_the_options_are_those_of_the_nearest_file_above(tmp_path: Path) -> None:
    write(tmp_path, FULL)
    folder = tmp_path / "src" / "models"
    folder.mkdir(parents=True)
    found = read_project(folder)
    assert found.file == tmp_path / "pyproject.toml"
    assert found.options == {
        "budget": "2m",
        "headroom": 0.1,
        "memory_limit": "12GiB",
        "trials": 30,
        "include": ["compile", "loss_chunks"],
        "fix": {"amp": "bf16", "num_workers": 2},
    }
    write(tmp_path / "src", "[project]\nname = 'inner'\n")
    assert not read_project(folder).options  # the inner project asks for nothing


def test_flags_override_it_and_what_it_asks_for_is_told(
    tmp_path: Path, searched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(write(tmp_path, "[tool.autotune]\nbudget = '2m'\nseed = 3\nfix = { amp = 'bf16' }\n"))
    assert main(["search", "model.py", "--budget", "9s", "--fix", "amp=off", "--json"]) == 0
    (asked,) = searched
    del asked["began_s"]  # when the command began
    assert asked == {"budget": "9s", "seed": 3, "fix": ["amp=off"], "runner": None}
    assert f"note: {tmp_path / 'pyproject.toml'} asks for seed = 3\n" in capsys.readouterr().err


def test_an_option_that_a_command_lacks_is_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(api, "explain", lambda model, config, **options: asked.update(options) or 1 / 0)
    monkeypatch.chdir(write(tmp_path, "[tool.autotune]\nbudget = '2m'\ndevice = 'cpu'\n"))
    main(["explain", "model.py"])
    del asked["on_warning"]  # prints what is not kept
    assert asked == {"device": "cpu"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["model.py", "--replay", "table.csv"], {"seed": 3, "fix": {"amp": "bf16"}, "include": ["batch_size"]}),
        (
            ["--command", "python train.py --batch {batch_size}"],
            {"device": "cpu", "global_batch": 8, "seed": 3, "include": ["batch_size"]},
        ),
        (["model.py", "--replay", "table.csv", "--device", "cuda"], {"device": "cuda"}),  # which the search refuses
    ],
)
def test_what_a_search_of_something_else_cannot_take_is_for_the_others(
    arguments: list[str], expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def search(model: str, *, listeners: Any, runner: Any = None, **options: Any) -> Any:
        asked.update(options)
        return answer("sqlite:///gpt.db")

    for name in ("search", "search_command"):
        monkeypatch.setattr(api, name, search)
    monkeypatch.setattr(commands, "_runner", lambda options: {})
    text = "device = 'cpu'\nglobal-batch = 8\nseed = 3\neval = true\ntrain-epochs = 2\n"
    text += "fix = { amp = 'bf16' }\ninclude = ['batch_size']\n"
    monkeypatch.chdir(write(tmp_path, f"[tool.autotune]\n{text}"))
    assert main(["search", *arguments]) == 0
    assert expected.items() <= asked.items()
    assert not asked.keys() & {"eval", "train_epochs"}
    if "--replay" in arguments:
        assert "global_batch" not in asked and asked.get("device") in (None, "cuda")
    else:
        assert "fix" not in asked


REPLAY, COMMAND = ("model.py", "--replay", "table.csv"), ("--command", "python train.py --batch {batch_size}")


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        ("devices = '1,2'", ("model.py",), {"sizes": [1, 2]}),
        ("devices = '1,2'", ("model.py", "--devices", "2"), {"devices": "2"}),
        ("devices = '1,2'", ("model.py", "--runner", "ray"), {}),
        ("devices = '1,2'", ("model.py", "--slots", "all"), {"slots": "all"}),
        ("devices = '1,2'", REPLAY, {}),
        ("devices = '1,2'", COMMAND, {}),
        ("devices = '2'", REPLAY, {}),
        ("devices = '2'", COMMAND, {"devices": "2"}),
        ("slots = 'all'", ("model.py", "--devices", "1,2"), {"sizes": [1, 2]}),
        ("slots = 'all'", ("model.py", "--devices", "1"), {"devices": "1", "slots": "all"}),
        ("slots = 'all'", REPLAY, {}),
        ("slots = 'all'", COMMAND, {}),
    ],
)
def test_devices_and_slots_are_taken_by_the_searches_that_have_them(
    text: str, arguments: tuple[str, ...], expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def search(model: str, sizes: list[int] | None = None, **options: Any) -> Any:
        given = {"sizes": sizes, **{name: options.get(name) for name in ("devices", "slots")}}
        asked.update({name: value for name, value in given.items() if value is not None})
        return answer("sqlite:///gpt.db")

    for name in ("search", "search_command", "search_on_each"):
        monkeypatch.setattr(api, name, search)
    monkeypatch.setattr(commands, "_runner", lambda options: {})
    monkeypatch.chdir(write(tmp_path, f"[tool.autotune]\n{text}\n"))
    assert main(["search", *arguments]) == 0
    assert asked == expected


def test_numbers_of_devices_to_compare_are_for_searches_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(api, "explain", lambda model, config, **options: asked.update(options) or 1 / 0)
    monkeypatch.chdir(write(tmp_path, "[tool.autotune]\ndevices = '1,2'\ndevice = 'cpu'\n"))
    main(["explain", "model.py"])
    del asked["on_warning"]  # prints what is not kept
    assert asked == {"device": "cpu"}


def test_a_flag_that_stands_instead_of_it_leaves_it_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(api, "predict", lambda model, config, **options: asked.update(options) or 1 / 0)
    monkeypatch.chdir(write(tmp_path, "[tool.autotune]\ndevice = 'cpu'\nheadroom = 0.1\n"))
    main(["predict", "model.py", "--gpu", "A100"])
    del asked["on_first"], asked["on_warning"]  # print what is known first, and what is not kept
    assert asked == {"gpu": "A100", "headroom": 0.1}


def test_how_a_study_was_asked_goes_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(api, "verify_answer", lambda model, study, **options: asked.update(options) or 1 / 0)
    study = write_study(tmp_path / "gpt.db")
    monkeypatch.chdir(write(tmp_path, "[tool.autotune]\nmemory-limit = '1GiB'\ntimeout = '5m'\n"))
    main(["verify", "model.py", "--against", str(study), "--steps", "9"])
    assert asked["timeout"] == "5m" and asked.get("memory_limit") != "1GiB"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bugdet = '2m'", "bugdet: there is no such option; did you mean budget?"),
        ("memory_limit = '2GiB'", "memory_limit: there is no such option; did you mean memory-limit?"),
        ("steps = 100", "steps: there is no such option; did you mean train-steps?"),
        ("quux = 1", "quux: there is no such option; expected one of device, devices, memory-limit,"),
        ("budget = true", "budget: True is not possible; expected more than 0 seconds"),
        ("trials = 2.5", "trials: 2.5 is not a whole number; expected at least 1"),
        ("trials = true", "trials: True is not a whole number; expected at least 1"),
        ("device = 0", "device: 0 is not text; expected auto|cpu|cuda[:i]"),
        ("include = 3", "include: 3 is not possible; expected a name, or a list of names"),
        ("include = [3]", "include: 3 is not possible; expected a name, or a list of names"),
        ("fix = 'amp'", "fix: 'amp' is not NAME=CHOICE; expected for example amp=bf16"),
        ("objective = 'speed'", "objective: 'speed' is not known; expected one of throughput, memory, balanced"),
        ("memory-limit = 0.8", "memory-limit: 0.8 is not possible; expected more than 0 bytes"),
    ],
)
def test_a_wrong_key_or_value_is_an_error_with_file_key_and_what_was_expected(
    text: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(write(tmp_path, f"[tool.autotune]\n{text}\n"))
    assert main(["search", "model.py"]) == 2
    assert f"autotune: {tmp_path / 'pyproject.toml'}: [tool.autotune] {expected}" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[tool]\nautotune = '2m'\n", "tool = '2m'\n", "[[tool.autotune]]\nbudget = '2m'\n"])
def test_what_is_no_table_of_options_is_an_error(text: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"pyproject\.toml: \[tool\.autotune\] is .*2m.*; expected a table of options"
    ):
        read_project(write(tmp_path, text))


def test_a_file_that_is_no_toml_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pyproject\.toml cannot be read: .*line 1"):
        read_project(write(tmp_path, "[tool.autotune\n"))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text("mine = 1\n")
    (tmp_path / "train.py").write_text("mine = 1\n")
    return tmp_path


def refused(arguments: list[str], file: str, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(file).read_bytes()
    assert main([*arguments, file]) == 2
    assert f"{arguments[-1]} {file} is {what} itself; expected another file" in capsys.readouterr().err
    assert Path(file).read_bytes() == before


@pytest.mark.parametrize("named", ["model.py", "model.py:mine"])
@pytest.mark.parametrize("command", [["report", "gpt.db", "--html"], ["export", "gpt.db", "--to", "json", "--out"]])
def test_what_is_made_of_a_study_does_not_replace_its_model_nor_itself(
    here: Path, named: str, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_study(here / "gpt.db", result=lambda storage: but(answer(storage), model=named))
    refused(command, "model.py", "the model file", capsys)
    refused(command, "gpt.db", "the study", capsys)


def test_what_is_made_of_a_commands_study_does_not_replace_its_script(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "python train.py --batch 8"
    write_study(here / "gpt.db", result=lambda storage: but(answer(storage), model="", command=line))
    refused(["report", "gpt.db", "--html"], "train.py", "a file of the command", capsys)


def test_a_searchs_answer_does_not_replace_its_script(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = "python train.py --batch {batch_size}"
    refused(["search", "--command", line, "--out"], "train.py", "a file of the command", capsys)


def test_a_replays_answer_does_not_replace_its_table(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "table.csv").write_text("not read\n")
    refused(["search", "model.py", "--replay", "table.csv", "--out"], "table.csv", "the table", capsys)


def test_an_output_may_name_a_file_whose_name_is_no_utf_8() -> None:
    write_output(Path("page.html"), "--html", os.fsdecode(b"of gr\xf6sser.py"))
    assert Path("page.html").read_bytes() == b"of gr\xf6sser.py"
