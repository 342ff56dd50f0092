"""Optuna's dashboard on a study: it answers on the loopback address and ends by Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from autotune.cli import main
from tests.report.sample_study import write_study


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
    return port


def fetched(url: str, running: subprocess.Popen[str]) -> bytes:
    for _ in range(600):
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                content: bytes = answer.read()
                return content
        except OSError:
            assert running.poll() is None, running.communicate()
            time.sleep(0.1)
    raise TimeoutError(url)


def started(study: Path, port: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "autotune", "dashboard", str(study), "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    # a shell's background jobs, which these tests may be, ignore the interrupt
    heard = signal.signal(signal.SIGINT, signal.default_int_handler)
    running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, heard)
    return running


def test_it_shows_the_study_on_this_machine_until_it_is_interrupted(tmp_path: Path) -> None:
    pytest.importorskip("optuna_dashboard")
    study, port = write_study(tmp_path / "gpt.db"), free_port()
    running = started(study, port)
    try:
        studies = json.loads(fetched(f"http://127.0.0.1:{port}/api/studies", running))
        assert "gpt" in json.dumps(studies)
        assert b"<html" in fetched(f"http://127.0.0.1:{port}/dashboard", running).lower()
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 0 and "Traceback" not in said
    assert said.startswith(f"http://127.0.0.1:{port}/ shows sqlite:///{study}; Ctrl-C ends it")


@pytest.mark.slow  # between answers it is held above
def test_an_interrupt_during_an_answer_ends_it(tmp_path: Path) -> None:
    pytest.importorskip("optuna_dashboard")
    port = free_port()
    running = started(write_study(tmp_path / "gpt.db"), port)
    try:
        fetched(f"http://127.0.0.1:{port}/api/studies", running)
        with socket.socket() as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # so that the answer cannot be sent whole
            reader.connect(("127.0.0.1", port))
            reader.sendall(b"GET /static/bundle.js HTTP/1.0\r\nAccept-Encoding: identity\r\n\r\n")
            assert reader.recv(15) == b"HTTP/1.0 200 OK"
            running.send_signal(signal.SIGINT)
            _, said = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 0 and "Traceback" not in said


def test_a_port_that_is_taken_is_an_error_with_the_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna_dashboard")
    study = write_study(tmp_path / "gpt.db", with_probes=False)
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        assert main(["dashboard", str(study), "--port", str(listening.getsockname()[1])]) == 2
    assert "cannot listen on port" in (said := capsys.readouterr().err) and "choose another --port or --host" in said


def test_a_host_that_is_not_known_is_an_error_with_the_next_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna_dashboard")
    study = write_study(tmp_path / "gpt.db", with_probes=False)
    assert main(["dashboard", str(study), "--host", "no.such.host.invalid"]) == 2
    assert "choose another --port or --host" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["99999", "-1", "http"])
def test_a_port_that_cannot_be_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "gpt.db", "--port", port]) == 2
    assert "expected a port from 0 to 65535" in (said := capsys.readouterr().err) and port in said


def test_without_optuna_dashboard_it_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna_dashboard", None)
    assert main(["dashboard", str(write_study(tmp_path / "gpt.db", with_probes=False))]) == 2
    assert "`pip install 'autotune-torch[dashboard]'` adds it" in capsys.readouterr().err


def test_a_study_that_is_not_there_is_told_before_anything_listens(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "nowhere.db"]) == 2
    assert "there is no study file nowhere.db" in capsys.readouterr().err
