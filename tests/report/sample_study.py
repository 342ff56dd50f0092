"""A study file as a search leaves it, with every kind of trial, made from a cost model instead of real probes."""

from __future__ import annotations

import itertools
import sqlite3
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import CategoricalDistribution
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from sqlalchemy.pool import NullPool

from autotune.records.check import Check
from autotune.records.config import Config
from autotune.records.formats import Group
from autotune.records.measured import Measured
from autotune.records.outcome import Kind, Measurement, Outcome
from autotune.records.result import Cost, Effect, Goal, PlayOffOutcome, Reasons, Result, Subject
from autotune.records.study import Prediction
from autotune.techniques import find_techniques
from autotune.units import MIB

complete = find_techniques().complete

GLOBAL_BATCH = 48
LIMIT = 1500 * MIB
HEADROOM = 0.05
SPACE: dict[str, list[Any]] = {
    "batch_size": [2, 4, 8, 12, 16, 24, 48],
    "amp": ["off", "bf16"],
    "checkpoint_segments": [0, 2, 4],
    "optimizer_impl": ["default", "fused"],
}
_DISTRIBUTIONS = {name: CategoricalDistribution(choices) for name, choices in SPACE.items()}


def config(batch_size: int, amp: str = "off", segments: int = 0, optimizer: str = "default") -> Config:
    choices = {"batch_size": batch_size, "amp": amp, "checkpoint_segments": segments, "optimizer_impl": optimizer}
    return complete(choices, global_batch=GLOBAL_BATCH)


BASELINE = config(16)
ANSWER = config(24, "bf16", 0, "fused")
RUNNER_UP = config(16, "bf16", 0, "fused")


def measured(chosen: Config, *, noise: float = 0.0) -> Outcome:
    """What the cost model says: memory is affine in the batch, a step is a floor and a slope."""
    bf16, segments = chosen["amp"] == "bf16", int(chosen["checkpoint_segments"])
    per_sample = (0.55 if bf16 else 1.0) * (0.45 if segments else 1.0) * 70 * MIB
    peak = int((180 if chosen["optimizer_impl"] == "fused" else 240) * MIB + per_sample * chosen.batch_size)
    micro_s = 0.02 + chosen.batch_size * (0.012 if bf16 else 0.021) * (1.3 if segments else 1.0)
    step_s = micro_s * chosen.accumulation_steps + (0.02 if chosen["optimizer_impl"] == "fused" else 0.035)
    speed = GLOBAL_BATCH / step_s * (1 + noise)
    if peak > LIMIT:
        cause = f"needs {peak / MIB:.0f} MiB of 1500 MiB: DefaultCPUAllocator: can't allocate memory"
        return Outcome(kind=Kind.OOM, cause=cause, stage="warmup", wall_s=0.9, train_s=0.4, attempted_bytes=64 * MIB)
    found = Measurement(
        samples_per_s=speed,
        samples_per_s_low=speed * 0.985,
        samples_per_s_high=speed * 1.012,
        step_s=step_s,
        peak_bytes=peak,
        block_samples_per_s=(speed, speed * 0.985, speed * 1.012),
        num_steps=9,
        setup_s=0.1,
        warmup_s=4 * step_s,
        timed_s=5 * step_s,
        phases_s={"data": 0.01, "forward": step_s * 0.3, "backward": step_s * 0.6, "optimizer": step_s * 0.1},
        final_loss=2.31,
        contention=0.01,
    )
    return Outcome(
        kind=Kind.OK, measurement=found, wall_s=9 * step_s + 0.3, train_s=9 * step_s, log="gpt.logs/probe.log"
    )


PREDICTION = Prediction(
    samples_per_s=72.1,
    samples_per_s_low=65.0,
    samples_per_s_high=80.2,
    peak_bytes=1100 * MIB,
    peak_low_bytes=1000 * MIB,
    peak_high_bytes=1210 * MIB,
    chance_to_win=0.45,
    chance_to_fit=0.99,
    reason="likely faster: bf16",
)

FAILURES = (
    (
        config(8, "bf16", 4, "fused"),
        Outcome(kind=Kind.TIMEOUT, cause="no end within 20 s", stage="warmup", wall_s=20.1),
    ),
    (
        config(4, "bf16", 2),
        Outcome(kind=Kind.CRASHED, cause="killed by SIGSEGV (segmentation fault)", stage="warmup", wall_s=0.5),
    ),
    (
        config(2, "off", 4),
        Outcome(
            kind=Kind.ERROR,
            cause="RuntimeError: view size is not compatible [in block.3]",
            detail="model.py, line 12",
            stage="setup",
            wall_s=0.4,
        ),
    ),
    (
        config(2, "bf16"),
        Outcome(kind=Kind.NONFINITE, cause="the loss is nan at step 3", stage="timing", wall_s=1.2, train_s=0.8),
    ),
)


def answer(storage: str) -> Result:
    """The answer that the sample's play-off leads to."""

    def play_off(chosen: Config) -> Measured:
        found = measured(chosen).measurement
        assert found is not None
        speed = found.samples_per_s
        return Measured(
            config=chosen.as_dict(),
            samples_per_s=speed,
            samples_per_s_ci=(speed * 0.985, speed * 1.014),
            peak_bytes=found.peak_bytes,
            step_s=found.step_s,
            num_processes=3,
        )

    best, base = play_off(ANSWER), play_off(BASELINE)
    ratio = best.samples_per_s / base.samples_per_s
    return Result(
        config=best.config,
        samples_per_s=best.samples_per_s,
        samples_per_s_ci=best.samples_per_s_ci,
        peak_bytes=best.peak_bytes,
        goal=Goal(memory_limit_bytes=LIMIT, headroom=HEADROOM, objective="throughput"),
        baseline=base,
        speedup=ratio,
        speedup_ci=(ratio * 0.98, ratio * 1.02),
        verdict="faster",
        play_off=PlayOffOutcome(finalists=(best, play_off(RUNNER_UP))),
        front=(play_off(config(2, "bf16", 4)), play_off(config(8, "bf16", 0, "fused")), best),
        reasons=Reasons(
            effects=(
                Effect(
                    technique="batch_size",
                    choice=24,
                    baseline_choice=16,
                    speed_ratio=1.03,
                    memory_ratio=1.41,
                    num_pairs=2,
                ),
                Effect(
                    technique="amp",
                    choice="bf16",
                    baseline_choice="off",
                    speed_ratio=1.61,
                    memory_ratio=0.63,
                    num_pairs=3,
                ),
                Effect(
                    technique="optimizer_impl",
                    choice="fused",
                    baseline_choice="default",
                    speed_ratio=None,
                    memory_ratio=None,
                    num_pairs=0,
                ),
            ),
            peak_by_kind={
                role: {
                    "parameters": 60 * MIB,
                    "gradients": 60 * MIB,
                    "optimizer": 120 * MIB,
                    "activations": kept,
                    "temporaries": MIB,
                }
                for role, kept in (("baseline", 500 * MIB), ("answer", 700 * MIB))
            },
            limit="Compute: a step is data 2%, forward 29%, backward 59%, optimizer 10%; a larger batch was not faster.",
        ),
        checks=(
            Check(
                technique="config",
                choice="",
                exact=False,
                loss_error=1.3e-4,
                gradient_error=3.1e-3,
                gradient_cosine=0.999995,
                buffer_error=0.0,
                names_equal=True,
                noise=2.2e-7,
                passed=True,
            ),
        ),
        cost=Cost(
            outcomes={"ok": 43, "oom": 5, "timeout": 1, "crashed": 1, "error": 1, "nonfinite": 1},
            probes=52,
            wall_s=118.3,
            train_s=99.1,
        ),
        storage=storage,
        study="gpt",
        subject=Subject(device="cpu", optimizer="AdamW"),
        warnings=("pin_memory has no effect on a CPU; leave it off",),
    )


def without_a_gain(storage: str) -> Result:
    """The answer of a search that found nothing better than the baseline."""
    found = answer(storage)
    assert found.baseline is not None
    kept = {
        name: value for name, value in vars(found.baseline).items() if name in ("config", "samples_per_s", "peak_bytes")
    }
    same = {"speedup": 1.0, "speedup_ci": (1.0, 1.0), "verdict": "same", "effects": (), "front": (found.baseline,)}
    return but(found, **kept, **same)


def but(result: Result, **changes: Any) -> Result:
    """The result with other values of some fields, those of its groups as well."""
    groups = {item.name: getattr(result, item.name) for item in fields(result)}
    inside = {name: group for name, group in groups.items() if isinstance(group, Group)}
    for name, group in inside.items():
        own = {field.name: changes.pop(field.name) for field in fields(group) if field.name in changes}
        inside[name] = replace(group, **own)
    return replace(result, **inside, **changes)


def write_study(
    path: Path,
    *,
    name: str = "gpt",
    with_probes: bool = True,
    with_result: bool = True,
    result: Callable[[str], Result] = answer,
) -> Path:
    """Write the sample study to an SQLite file."""
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = f"sqlite:///{path}"
    engine = {"creator": lambda: _connect_without_waiting(path), "poolclass": NullPool}
    study = optuna.create_study(storage=RDBStorage(url, engine_kwargs=engine), study_name=name, direction="maximize")
    attributes = {
        "format": 1,
        "task": "gpt",
        "objective": "throughput",
        "memory_limit_bytes": LIMIT,
        "headroom": HEADROOM,
        "fingerprint": {"device": "cpu AMD EPYC", "torch": "2.13.0"},
        "space": SPACE,
        "unsupported": {"channels_last": "the model has no 2-D convolution"},
        "baseline_config": BASELINE.as_dict(),
    }
    for key, value in attributes.items():
        study.set_user_attr(key, value)
    if with_probes:
        _add_probes(study)
    if with_result:
        study.set_user_attr("result", result(url).to_dict())
    return path


def add_probe(file: Path, chosen: Config, outcome: Outcome, **attributes: Any) -> None:
    """Add one probe to a study that was written."""
    _add(optuna.load_study(study_name="gpt", storage=f"sqlite:///{file}"), chosen, outcome, **attributes)


def _connect_without_waiting(path: Path) -> sqlite3.Connection:
    """A connection that does not wait for the disk: many small transactions take a second, not a minute."""
    connection = sqlite3.connect(path, check_same_thread=False)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA journal_mode = MEMORY")
    return connection


def _add_probes(study: optuna.Study) -> None:
    _add(study, BASELINE, measured(BASELINE), stage="baseline", reason="what you run today")
    for chosen, outcome in FAILURES:
        _add(study, chosen, outcome, stage="search", reason="proposed by gp")
    done = {BASELINE, *(chosen for chosen, _ in FAILURES)}
    for batch_size, amp, (segments, optimizer) in itertools.product(
        SPACE["batch_size"], SPACE["amp"], ((0, "default"), (0, "fused"), (2, "fused"))
    ):
        chosen = config(batch_size, amp, segments, optimizer)
        if chosen not in done and (batch_size < 48 or amp == "bf16"):
            _add(
                study,
                chosen,
                measured(chosen),
                stage="search",
                reason="likely faster",
                prediction=PREDICTION.to_dict(),
                disturbed=batch_size == 4 and segments == 2,
            )
    without_amp = config(24, "off", 0, "fused")
    _add(study, without_amp, measured(without_amp), stage="ablation", reason="the best without amp")
    for number, chosen in itertools.product(range(3), (ANSWER, RUNNER_UP, BASELINE)):
        outcome = measured(chosen, noise=0.004 * (number - 1))
        _add(study, chosen, outcome, stage="play-off", reason=f"round {number + 1}", round=number)
    lost = study.ask(_DISTRIBUTIONS)
    lost.set_user_attr("config", BASELINE.as_dict())
    study.tell(lost, state=TrialState.FAIL)
    running = study.ask(_DISTRIBUTIONS)
    running.set_user_attr("config", BASELINE.as_dict())


def _add(study: optuna.Study, chosen: Config, outcome: Outcome, *, disturbed: bool = False, **attributes: Any) -> None:
    found = outcome.measurement
    feasible = found is not None and found.peak_bytes <= LIMIT * (1 - HEADROOM)
    study.add_trial(
        optuna.trial.create_trial(
            value=found.samples_per_s if found else 0.0,
            params={name: chosen[name] for name in SPACE},
            distributions=dict(_DISTRIBUTIONS),
            user_attrs={
                "config": chosen.as_dict(),
                "outcome": outcome.to_dict(),
                "feasible": feasible,
                "disturbed": disturbed,
                **attributes,
            },
        )
    )
