"""What a study keeps, through JSON and from older versions."""

from __future__ import annotations

import json

from autotune.records.check import Comparison
from autotune.records.measured import Evaluated
from autotune.records.outcome import Kind, Outcome
from autotune.records.study import BegunTrial, EndedTrial, Fingerprint, StudyFacts
from tests.report.sample_study import PREDICTION, answer

FACTS = StudyFacts(
    fingerprint=Fingerprint(
        techniques=("amp", "compile"), choices={"amp": ("bf16", "off")}, environment={"MKL": "AVX2"}
    ),
    asked={"device": "cpu"},
    space={"amp": ("off", "bf16"), "batch_size": (1, 2)},
    format=3,
    result=answer("sqlite:///gpt.db"),
    whole_rounds=(0, 2),
    checks=(Comparison(changes=(("amp", "bf16"), ("batch_size", 2)), check=answer("sqlite:///gpt.db").checks[0]),),
    evaluated={"{}": (Evaluated(eval_batch_size=4, kind="ok", fits=True, samples_per_s_ci=(1.0, 2.0)),)},
)


def test_what_a_study_keeps_comes_back_through_json() -> None:
    assert StudyFacts.from_dict(json.loads(json.dumps(FACTS.to_dict()))) == FACTS


def test_a_study_that_says_nothing_opens() -> None:
    assert StudyFacts.from_dict({}) == StudyFacts() and StudyFacts().format == 1


def test_an_older_fingerprint_has_the_variables_of_the_environment_beside_the_rest() -> None:
    older = {"device": "cpu", "batch": ["int64 (2,)"], "ONEDNN_MAX_CPU_ISA": "AVX2", "DNNL_MAX_CPU_ISA": ""}
    assert StudyFacts.from_dict({"fingerprint": older}).fingerprint == Fingerprint(
        device="cpu", batch=("int64 (2,)",), environment={"ONEDNN_MAX_CPU_ISA": "AVX2"}
    )


def test_a_trial_of_format_1_has_a_forecast_and_no_number() -> None:
    older = {"config": {"batch_size": 4}, "stage": "search", "reason": "", "forecast": PREDICTION.to_dict()}
    assert BegunTrial.from_dict(older) == BegunTrial(config={"batch_size": 4}, stage="search", prediction=PREDICTION)


def test_the_outcome_is_the_last_that_is_written_of_a_trial() -> None:
    assert [*EndedTrial(feasible=False, outcome=Outcome(kind=Kind.OOM)).to_dict()][-1] == "outcome"
