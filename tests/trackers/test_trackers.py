"""A search as trackers keep it. TensorBoard's files are written and read; Weights & Biases and MLflow are the real ones where
they are installed, else stand-ins with the signatures of what is called."""

from __future__ import annotations

import inspect
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from autotune.cli import main
from autotune.errors import ConfigError
from autotune.records.study import Trial
from autotune.trackers import Answer, Point, Start, Tracker, tracker, trackers
from autotune.trackers.mlflow import MLflow
from autotune.trackers.tensorboard import TensorBoard
from autotune.trackers.wandb import WandB
from autotune.tuning.events import Event, ProbeEnded, SearchEnded
from tests.report.sample_study import ANSWER, BASELINE, FAILURES, answer, measured
from tests.report.test_live import STARTED

RESULT = answer("sqlite:///gpt.db")
PROBES = ((BASELINE, measured(BASELINE)), FAILURES[0], (ANSWER, measured(ANSWER)))


def events() -> Iterator[Event]:
    """A baseline, a probe that timed out, one that is better, and the answer."""
    yield STARTED
    for number, (config, outcome) in enumerate(PROBES):
        trial = Trial(number=number, stage="search", config=config, outcome=outcome, feasible=outcome.ok)
        yield ProbeEnded(trial=trial, best=None, baseline=None, elapsed_s=1.0)
    yield SearchEnded(result=RESULT)


def track(kept: Tracker) -> None:
    with kept:
        for event in events():
            kept.on(event)


class Recording(Tracker):
    name, summary, package, install = "recording", "for tests", "json", "json"

    def __init__(self, where: str = "") -> None:
        super().__init__(where)
        self.kept: list[Any] = []

    def begin(self, start: Start) -> None:
        self.kept.append(start)

    def point(self, point: Point) -> None:
        self.kept.append(point)
        if self.where == "gone":
            raise ConnectionError("the server is gone\nand more")

    def answer(self, answer: Answer) -> None:
        self.kept.append(answer)

    def finish(self) -> None:
        self.kept.append("finished")


def test_each_probe_is_a_point_with_config_speed_memory_and_outcome_and_the_answer_a_summary() -> None:
    track(recording := Recording())
    start, baseline, failed, better, found, finished = recording.kept
    assert (start.study, start.facts["memory_limit_bytes"], finished) == ("gpt", STARTED.memory_limit_bytes, "finished")
    assert baseline.config == BASELINE.as_dict() and baseline.figures["samples_per_s"] > 0
    assert failed.facts == {"stage": "search", "outcome": "timeout", "cause": "no end within 20 s"}
    assert "samples_per_s" not in failed.figures and failed.figures["feasible"] == 0.0
    assert better.figures["peak_bytes"] == measured(ANSWER).measurement.peak_bytes  # type: ignore[union-attr]
    assert found.config == RESULT.config and found.facts["verdict"] == "faster" and found.figures["speedup"] > 1


def test_a_tracker_that_fails_is_told_of_once_and_holds_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    track(recording := Recording("gone"))
    assert len(recording.kept) == 2
    assert caplog.messages == [
        "tracking by recording ends here, the search goes on: ConnectionError: the server is gone"
    ]


def test_a_server_that_does_not_answer_holds_back_no_answer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answers = threading.Event()

    class Waiting(Recording):
        def begin(self, start: Start) -> None:
            answers.wait(20)
            super().begin(start)

    monkeypatch.setattr("autotune.trackers.WAIT_S", 0.1)
    track(waiting := Waiting())
    assert not waiting.kept and not answers.is_set()
    assert caplog.messages == ["tracking by recording did not end within 0.1 s, and is waited for no longer"]
    answers.set()


def test_a_name_and_a_place_make_a_tracker() -> None:
    assert {"tensorboard", "wandb", "mlflow"} <= trackers().keys()
    made = tracker("mlflow:http://127.0.0.1:5000")
    assert isinstance(made, MLflow) and made.where == "http://127.0.0.1:5000"
    assert isinstance(tracker("wandb"), WandB)


def test_an_unknown_name_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", "model.py", "--track", "aim:here"]) == 2
    assert "'aim' is not a known tracker; expected NAME or NAME:WHERE, with one of mlflow: " in capsys.readouterr().err


def test_a_package_that_is_missing_is_named_before_anything_takes_seconds() -> None:
    class Missing(Recording):
        package, install = "no_such_package", "such-a-package"

    with pytest.raises(ConfigError, match="needs such-a-package, which is not installed; `pip install such-a-package`"):
        track(Missing())


def test_tensorboards_files_hold_curves_the_table_of_configs_and_the_answer(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event as Written

    track(TensorBoard(str(tmp_path)))
    files = sorted(tmp_path.rglob("events.out.tfevents*"))
    written: dict[str, list[tuple[int, float]]] = {}
    text = b""
    for file in files:
        data, at = file.read_bytes(), 0
        text += data
        while at < len(data):  # length, its checksum, the record, its checksum
            (length,) = struct.unpack_from("<Q", data, at)
            event = Written.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            for value in event.summary.value:
                written.setdefault(value.tag, []).append((event.step, value.simple_value))
    assert {file.parent.relative_to(tmp_path).parts[0] for file in files} == {"gpt"} and len(files) == 1 + len(PROBES)
    speeds = dict(written["probe/samples_per_s"])
    assert speeds.keys() >= {0, 2} and speeds[2] == pytest.approx(measured(ANSWER).measurement.samples_per_s)  # type: ignore[union-attr]
    assert written["answer/speedup"][0][1] == pytest.approx(RESULT.speedup)
    assert b"checkpoint_segments" in text and b"_hparams_/session_start_info" in text
    said = indent(RESULT.summary(), " " * 4).encode()
    assert said in text and b"Limit of the speed now" in said and b"Faster: 1.73x the baseline's throughput" in said
    assert b"| verdict |" not in text


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is called of W&B, with its signatures (0.31)."""
    called: list[Any] = []

    class Run:
        def __init__(self) -> None:
            self.summary = SimpleNamespace(update=lambda given: called.append(("summary", given)))

        def define_metric(self, name: str, step_metric: Any = None, **_: Any) -> None:
            called.append(("metric", name, step_metric))

        def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
            called.append(("log", data))

        def finish(self, exit_code: int | None = None, *, quiet: bool | None = None) -> None:
            called.append(("finish",))

    def init(
        *,
        project: str | None = None,
        name: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        config: dict[str, Any] | None = None,
        reinit: str | None = None,
    ) -> Run:
        called.append(("init", project, name))
        return Run()

    fake = ModuleType("wandb")
    fake.__spec__ = find_spec("json")
    fake.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    return called


def test_weights_and_biases_has_a_run_of_steps_and_the_answer_as_its_summary(fake_wandb: list[Any]) -> None:
    track(WandB("mine"))
    init, _, *steps, summary, finish = fake_wandb
    assert (init, finish) == (("init", "mine", "gpt"), ("finish",))
    assert [step[1]["probe"] for step in steps] == [0, 1, 2] and steps[2][1]["config/amp"] == "bf16"
    assert summary[1]["answer"]["config"] == RESULT.config


class FakeClient:
    """What is called of MLflow's client, with its signatures (3.17); a run that ends is linked to as one of a server is."""

    made: list[FakeClient]

    def __init__(self, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.experiments: dict[str, str] = {}
        self.made.append(self)

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="1") if name in self.experiments else None

    def create_experiment(self, name: str, artifact_location: Any = None, tags: Any = None) -> str:
        self.experiments[name] = "1"
        return "1"

    def create_run(self, experiment_id: str, start_time: Any = None, tags: Any = None, run_name: Any = None) -> Any:
        self.runs[run := f"run{len(self.runs)}"] = {"name": run_name, "tags": dict(tags or {})}
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def log_batch(
        self, run_id: str, metrics: Any = (), params: Any = (), tags: Any = (), synchronous: Any = None
    ) -> None:
        run = self.runs[run_id]
        run.setdefault("metrics", {}).update({metric.key: metric.value for metric in metrics})
        run.setdefault("params", {}).update({param.key: param.value for param in params})
        run["tags"].update({tag.key: tag.value for tag in tags})

    def set_terminated(self, run_id: str, status: str | None = None, end_time: int | None = None) -> None:
        self.runs[run_id]["status"] = status
        if os.environ.get("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT") != "true":
            print(f"View run at {run_id}")


@pytest.fixture
def fake_mlflow(monkeypatch: pytest.MonkeyPatch) -> list[FakeClient]:
    monkeypatch.setattr(os, "environ", {**os.environ})  # put back as it was

    def record(*names: str) -> Any:
        return lambda *values: SimpleNamespace(**dict(zip(names, values, strict=True)))

    fake, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    fake.__spec__, fake.__path__ = find_spec("json"), []
    FakeClient.made = []
    fake.MlflowClient = FakeClient  # type: ignore[attr-defined]
    entities.Metric = record("key", "value", "timestamp", "step")  # type: ignore[attr-defined]
    entities.Param = entities.RunTag = record("key", "value")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return FakeClient.made


def test_mlflow_has_a_run_for_the_search_with_a_run_for_each_probe_in_it(fake_mlflow: list[FakeClient]) -> None:
    track(MLflow())
    search, *probes = fake_mlflow[0].runs.values()
    assert [probe["tags"]["mlflow.parentRunId"] for probe in probes] == ["run0"] * 3
    assert [probe["status"] for probe in probes] == ["FINISHED", "FAILED", "FINISHED"]
    assert search["status"] == "FINISHED" and search["params"]["amp"] == "bf16" and search["metrics"]["speedup"] > 1


def test_mlflow_leaves_stdout_to_the_search(fake_mlflow: list[FakeClient], capsys: pytest.CaptureFixture[str]) -> None:
    track(MLflow("http://127.0.0.1:5000"))
    assert capsys.readouterr().out == ""


REAL = """
import sys
from tests.trackers.test_trackers import track
from autotune.trackers import tracker
track(tracker(sys.argv[1]))
"""


def run(where: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", REAL, where],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "ends here" not in done.stderr, done.stderr
    return done.stderr


@pytest.mark.slow
def test_mlflow_itself_keeps_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{tmp_path}/mlruns"
    run(f"mlflow:{uri}", tmp_path)
    client = mlflow.MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("gpt").experiment_id])
    (search,) = [one for one in runs if "mlflow.parentRunId" not in one.data.tags]
    assert len(runs) == 4 and search.info.status == "FINISHED"
    assert search.data.metrics["speedup"] == RESULT.speedup and search.data.params["amp"] == "bf16"


@pytest.mark.slow
def test_weights_and_biases_itself_keeps_an_offline_run(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    assert {"project", "name", "group", "job_type", "config", "reinit"} <= inspect.signature(
        wandb.init
    ).parameters.keys()
    run("wandb:mine", tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    (kept,) = tmp_path.rglob("*.wandb")
    data = kept.read_bytes()
    assert b"config/amp" in data and b"verdict" in data


def test_a_search_is_tracked_by_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboardX")
    gpt = Path(__file__).parents[2] / "studies" / "gpt"
    monkeypatch.chdir(tmp_path)
    options = ["--replay", str(gpt / "cpu.csv"), "--budget", "60s", "--storage", str(tmp_path / "gpt.db"), "--quiet"]
    assert main(["search", str(gpt / "model.py"), *options, "--track", "tensorboard:kept"]) == 0
    assert len(list((tmp_path / "kept").rglob("events.out.tfevents*"))) > 5
