"""The commands on a study that several searches share: on a server, whose password nobody sees, and in a journal."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from autotune.cli import main
from autotune.study.reading import load_study
from tests.controllers import ROOT
from tests.postgres import PASSWORD, Server, free_port, server

__all__ = ["server"]

GPT = ROOT / "studies" / "gpt"
SEARCH = ["search", str(GPT / "model.py"), "--replay", str(GPT / "cpu.csv"), "--budget", "30s", "--trials", "3"]


@pytest.fixture(scope="module")
def searched(server: Server) -> tuple[str, str]:
    """The URL of a study, and all that its search printed."""
    url = server.new_database()
    command = [sys.executable, "-m", "autotune", *SEARCH, "--storage", url, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return url, ended.stdout + ended.stderr


def test_a_search_keeps_its_study_on_the_server_and_shows_no_password(searched: tuple[str, str]) -> None:
    url, printed = searched
    assert PASSWORD not in printed and load_study(url).answer().storage in printed
    assert load_study(url).answer().storage == url.replace(f":{PASSWORD}", "")


@pytest.mark.parametrize(
    "words",
    [
        ["show", "URL"],
        ["show", "URL", "--json"],
        ["show", "URL", "--csv"],
        ["report", "URL", "--html", "page.html"],
        ["compare", "URL", "URL"],
        ["export", "URL", "--to", "env"],
    ],
    ids=lambda words: " ".join(words),
)
def test_a_command_reads_the_study_and_shows_no_password(
    words: list[str], searched: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([searched[0] if word == "URL" else word for word in words]) == 0
    told = capsys.readouterr()
    page = Path("page.html").read_text() if words[0] == "report" else ""
    assert told.out and PASSWORD not in told.out + told.err + page


def test_an_answer_is_verified_against_the_study_and_what_was_seen_is_kept_there(
    searched: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from autotune import api
    from autotune.records.config import Config
    from autotune.records.outcome import Kind, Outcome
    from tests.closed_form import measurement

    def verify(task: object, turns: list[dict[str, object]], *args: object) -> tuple[list[Outcome], None]:
        configs = [Config(tuple(turn.items())) for turn in turns]
        return [Outcome(kind=Kind.OK, measurement=measurement(one, 1000.0, 1), wall_s=1.0) for one in configs], None

    monkeypatch.setattr(api, "_run_each", verify)
    main(["verify", str(GPT / "model.py"), "--against", searched[0], "--steps", "3"])
    told = capsys.readouterr()
    assert PASSWORD not in told.out + told.err and "not kept in the study" not in told.err


def test_a_wrong_password_or_database_is_told_without_the_password(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = server.url("postgres").replace(PASSWORD, "another-secret")
    for words in (["show", wrong], ["show", wrong, "--debug"], [*SEARCH, "--storage", wrong], ["dashboard", wrong]):
        assert main(words) == 2
        told = capsys.readouterr()
        assert "password authentication failed" in told.err and "another-secret" not in told.out + told.err


def test_the_password_is_no_part_of_the_processs_title(searched: tuple[str, str]) -> None:
    port = free_port()
    command = [sys.executable, "-m", "autotune", "dashboard", f"{searched[0]}?sslpassword=other", "--port", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            shown = process.stderr.readline()
            title = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
            page = urllib.request.urlopen(f"http://127.0.0.1:{port}/dashboard", timeout=30).read()
        finally:
            process.kill()
    assert f"http://127.0.0.1:{port}/ shows postgresql+psycopg://tester@" in shown and page
    assert "tester:" in title and PASSWORD not in title + shown and "sslpassword=*****" in title


def test_a_journal_is_shown_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"journal:///{tmp_path}/gpt.log"
    assert main([*SEARCH, "--storage", url, "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["storage"] == url
    assert main(["show", url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["storage"] == url
