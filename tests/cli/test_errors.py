"""Whatever goes wrong, the exit code is the one that is promised, and with `--json` there is one document."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import commands, main
from autotune.errors import ConfigError
from autotune.tuning.recommend import NothingFeasible

TINY = Path(__file__).parent.parent / "models" / "tiny.py"
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/data/studies/gpt.logs/0003-probe.log")


@pytest.fixture
def devices_raises(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `autotune devices` raise."""

    def make(error: BaseException) -> None:
        def command(options: object) -> int:
            raise error

        monkeypatch.setattr(commands, "devices", command)

    return make


def run(*arguments: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "autotune", *arguments]
    return subprocess.run(command, cwd=cwd, text=True, timeout=100, **{"capture_output": True} | options)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["search", "model.py", "--memory-limit", "lots"], "'lots' is not a memory size"),
        (["search"], "MODEL"),
        (["serach", "model.py"], "serach"),
        (
            ["search", "model.py", "--trails", "3"],
            "'--trails' is not an argument of `autotune search` (did you mean --trials?)",
        ),
        (["search", "model.py", "--fix", "amp"], "'amp' is not NAME=CHOICE"),
        (["show"], "STUDY"),
        (["search", "model.py", "other.py"], "'other.py' is not an argument"),
        (["verify", "model.py", "--config", "{}", "--steps", "many"], "many"),
    ],
)
def test_a_usage_error_is_a_document_too(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    plain = capsys.readouterr()
    (line,) = plain.err.splitlines()  # no lines of usage before it
    assert plain.out == "" and line.startswith("autotune: ")
    assert expected in line and "--help" in line
    assert main([*arguments, "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert expected in found["error"] and found["exit_code"] == 2


def test_a_full_disk_names_the_path_and_the_next_step(devices_raises: Any, capsys: pytest.CaptureFixture[str]) -> None:
    devices_raises(FULL)
    assert main(["devices", "--json"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["exit_code"] == 2
    for text in (captured.err, json.loads(captured.out)["error"]):
        assert "/data/studies/gpt.logs/0003-probe.log: No space left on device; free space" in text
    assert "Traceback" not in captured.err


def test_a_fault_of_autotune_itself_shows_its_traceback(
    devices_raises: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    devices_raises(TypeError("no such thing"))
    assert main(["devices", "--json"]) == 2
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["exit_code"] == 2 and "TypeError: no such thing" in found["error"]
    assert "Traceback" in captured.err and captured.err.splitlines()[-1].startswith(
        "autotune: TypeError: no such thing"
    )


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("bad", frames="  in model.py"), 2), (NothingFeasible("none"), 1), (FULL, 2)]
)
def test_debug_adds_a_traceback_and_changes_nothing_else(
    devices_raises: Any, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    devices_raises(error)
    assert main(["devices", "--json"]) == code
    without = capsys.readouterr()
    assert main(["devices", "--json", "--debug"]) == code
    debugged = capsys.readouterr()
    assert debugged.out == without.out
    assert "Traceback" in debugged.err and debugged.err.endswith(without.err) and "Traceback" not in without.err


def test_an_interrupt_is_130(devices_raises: Any, capsys: pytest.CaptureFixture[str]) -> None:
    devices_raises(KeyboardInterrupt())
    assert main(["devices", "--json"]) == 130
    assert json.loads(capsys.readouterr().out) == {"error": "interrupted", "exit_code": 130}


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_stdout_on_a_full_disk_is_an_error(tmp_path: Path, unbuffered: str) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        streams: dict[str, Any] = {"capture_output": False, "stdout": full, "stderr": subprocess.PIPE}
        done = run("devices", "--json", cwd=tmp_path, env=environment, **streams)
    assert done.returncode == 2
    assert done.stderr.startswith("autotune: No space left on device") and "Traceback" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_has_gone_is_no_error(tmp_path: Path, unbuffered: str) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    reader, writer = os.pipe()
    os.close(reader)
    streams: dict[str, Any] = {"capture_output": False, "stdout": writer, "stderr": subprocess.PIPE}
    done = run("devices", cwd=tmp_path, env=environment, **streams)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_import_log_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    shutil.copy(TINY, tmp_path)
    log = tmp_path / "studies" / "tiny.logs" / "import.log"
    log.mkdir(parents=True)
    done = run("search", "tiny.py", "--device", "cpu", "--budget", "1m", "--json", cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert str(log) in json.loads(done.stdout)["error"] and "Is a directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_document_that_cannot_be_written_to_out_is_one_error_and_no_second_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from autotune import api
    from tests.report.sample_study import answer

    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").touch()
    monkeypatch.setattr(api, "search", lambda *args, **options: answer("sqlite:///gpt.db"))
    assert main(["search", "tiny.py", "--json", "--out", "/dev/full"]) == 2
    assert "/dev/full" in json.loads(capsys.readouterr().out)["error"]


@pytest.mark.parametrize(
    ("error", "code"), [(NothingFeasible("none"), 1), (ConfigError("bad"), 2), (KeyboardInterrupt(), 130)]
)
def test_a_search_without_an_answer_leaves_no_older_one_in_out(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from autotune import api

    def search(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(api, "search", search)
    shutil.copy(TINY, "tiny.py")
    out = Path("result.json")
    out.write_text('{"config": {"batch_size": 8}}')
    assert main(["search", "tiny.py", "--json", "--out", str(out)]) == code
    printed = json.loads(capsys.readouterr().out)
    assert json.loads(out.read_text()) == printed and printed["exit_code"] == code
    assert main(["search", "tiny.py", "--json", "--out", "/dev/full"]) == code
    assert json.loads(capsys.readouterr().out) == printed


def test_a_model_file_that_is_not_there_leaves_no_older_answer_in_out(capsys: pytest.CaptureFixture[str]) -> None:
    out = Path("result.json")
    out.write_text('{"config": {"batch_size": 8}}')
    assert main(["search", "no_such.py", "--out", str(out)]) == 2
    assert "no_such.py" in json.loads(out.read_text())["error"]


def test_a_model_that_is_no_model_file_is_not_written_over(capsys: pytest.CaptureFixture[str]) -> None:
    model = Path("weights.json")
    model.write_text("{}")
    assert main(["search", str(model), "--out", str(model)]) == 2
    assert model.read_text() == "{}"
