"""The Python API: what it takes and refuses before anything runs."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import autotune
from autotune import api
from autotune.errors import ConfigError, TaskError
from autotune.records.outcome import Kind, Outcome
from autotune.records.result import Result
from autotune.techniques import find_techniques
from autotune.tuning.events import Note
from tests.closed_form import measurement
from tests.report.sample_study import answer
from tests.runners.test_calibrate import CONVOLUTIONS

TINY = Path(__file__).parent / "models" / "tiny.py"
GPT = Path(__file__).parents[1] / "studies" / "gpt"


def test_a_config_of_another_global_batch_is_refused_with_how_to_run_it(tmp_path: Path) -> None:
    config = {"batch_size": 16, "accumulation_steps": 6}
    with pytest.raises(
        ConfigError, match=r"96 samples per optimizer step.*is 48.*global batch of 96 \(--global-batch 96"
    ):
        api.probe(TINY, config, device="cpu", logs=tmp_path)


def test_an_unknown_sampler_is_refused_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"'psychic' is not known; expected one of .*cost-model.*tpe"):
        api.search(TINY, device="cpu", sampler="psychic")
    assert not list(tmp_path.iterdir())


def test_an_unknown_framework_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'keras' is not known; expected some of transformers, lightning"):
        api.search(TINY, device="cpu", frameworks=["keras"])


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_search_from_python_shows_its_progress_as_the_command_line_does_and_none_without_listeners(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal  # type: ignore[method-assign]
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(api, "run_search", lambda *_, listener, **__: listener.on(Note(text="probing")))
    api.search(TINY)
    assert stream.getvalue() == "note: probing\n"
    stream.truncate(0)
    stream.seek(0)
    api.search(TINY, listeners=[])
    assert not stream.getvalue()


def test_what_is_found_of_some_numbers_of_devices_is_not_lost_where_another_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [answer("studies/tiny.db")]

    def search(*arguments: object, **options: object) -> Result:
        if not answers:
            raise TaskError("a global batch of 50 is no multiple of 4")
        return answers.pop()

    monkeypatch.setattr(api, "run_search", search)
    found = api.search_on_each(TINY, [1, 2], device="cpu", listeners=[])
    assert [row.num_processes for row in found.rows] == [1]
    assert found.failed == {"2": "a global batch of 50 is no multiple of 4"}
    with pytest.raises(TaskError):  # of none is anything found
        api.search_on_each(TINY, [1, 2], device="cpu", listeners=[])


def test_slots_are_refused_for_several_numbers_of_devices_before_the_first_is_searched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "run_search", lambda *_, **__: pytest.fail("it was searched"))
    with pytest.raises(ConfigError, match=r"slots all cannot be chosen: .*--devices 1,2 trains with several"):
        api.search_on_each(TINY, [1, 2], device="cpu", slots="all")


def test_a_script_sees_a_line_for_each_probe_on_stderr(tmp_path: Path) -> None:
    script = (
        "import autotune\n"
        "from autotune.runners.replay import ReplayRunner\n"
        f"runner = ReplayRunner({str(GPT / 'cpu.csv')!r})\n"
        f"result = autotune.search({str(GPT / 'model.py')!r}, runner=runner, trials=3{{}})\n"
        "print(result.probes)\n"
    )

    def run(listeners: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script.format(listeners)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)

    shown = run("")
    assert len(re.findall(r"^\[.*s\] #\d+ ", shown.stderr, re.MULTILINE)) == int(shown.stdout)
    assert not run(", storage='other.db', listeners=[]").stderr


def test_without_a_stderr_a_search_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    monkeypatch.setattr(api, "run_search", lambda *_, listener, **__: listener.on(Note(text="probing")))
    api.search(TINY)


def test_a_sweep_and_a_prediction_go_by_the_measured_rates_too(avx2: None, tmp_path: Path) -> None:
    model = tmp_path / "images.py"
    model.write_text(CONVOLUTIONS)
    assert "FLOP/s" in api.predict(model, device="cpu", logs=tmp_path).left_out["amp"]
    others = ("channels_last", "checkpoint_segments", "optimizer_impl")
    swept = api.sweep(
        model, out=tmp_path / "images.csv", device="cpu", grid={"batch_size": (32,)}, exclude=others, max_repeats=1
    )
    assert "FLOP/s" in swept.header.reasons["amp"] and swept.header.choices["amp"] == ("off",)


def test_a_number_that_applies_need_not_be_among_those_searched(tmp_path: Path) -> None:
    """Of 12 blocks a search tries 1, 2, 3, 4, 6 and 12 segments at most."""
    (tmp_path / "deep.py").write_text(
        "import torch\n"
        "def build_model():\n"
        "    blocks = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()) for _ in range(12)]\n"
        "    return torch.nn.Sequential(torch.nn.Sequential(*blocks), torch.nn.Linear(8, 2))\n"
        "def make_batch(n):\n"
        "    return torch.randn(n, 8), torch.randint(2, (n,))\n"
    )
    outcome = api.probe(tmp_path / "deep.py", {"batch_size": 4, "checkpoint_segments": 5}, device="cpu", logs=tmp_path)
    assert outcome.ok, outcome


def test_the_function_predict_is_not_hidden_by_the_package_of_its_name(tmp_path: Path) -> None:
    for _ in range(2):  # importing it the first time sets the package in its place
        with pytest.raises(ConfigError, match="'wings' is not a technique"):
            autotune.predict(TINY, {"wings": 2}, device="cpu", logs=tmp_path)


def test_a_run_whose_memory_is_expected_to_outgrow_the_limit_is_told() -> None:
    config = find_techniques().complete({"batch_size": 8})

    def told(limit_bytes: int | None, growth_bytes: int) -> str:
        found = replace(measurement(config, 100.0, 2**30), long_run_growth_bytes=growth_bytes)
        return api._outgrows(limit_bytes, config, Outcome(kind=Kind.OK, measurement=found, wall_s=1.0))

    assert told(2**30 + 2**20, 2**29).startswith(
        "batch 8: its memory still grew, and a long run is expected to hold 1.50 GiB"
    )
    assert told(2**31, 2**29) == "" == told(2**29, 0) == told(None, 2**29)
