from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autotune.records.measured import Measured, OneDevice
from autotune.records.price import Price
from autotune.records.result import Goal, Money, Result, Subject
from autotune.records.scaling import Scaling
from autotune.report.html import fragment
from autotune.report.scaling import one_device_section, scaling_section
from autotune.report.sections import Section
from autotune.report.terminal import as_text
from autotune.techniques import find_techniques
from autotune.units import MIB
from tests.records.test_scaling import on

TECHNIQUES = find_techniques()
BASELINE = TECHNIQUES.complete({"batch_size": 8, "accumulation_steps": 2}).as_dict()
ANSWER = TECHNIQUES.complete({"batch_size": 16, "amp": "bf16"}).as_dict()
ALONE = TECHNIQUES.complete({"batch_size": 8, "accumulation_steps": 4}).as_dict()
FOUND: dict[str, Any] = {
    "efficiency": 0.9,
    "efficiency_ci": (0.85, 0.95),
    "speedup": 2.5,
    "speedup_ci": (2.4, 2.6),
}


def test_each_number_of_devices_has_a_row_and_what_more_of_them_add_is_said() -> None:
    told = as_text([scaling_section(Scaling.of([on(1, 100.0), on(2, 180.0)]), find_techniques())], 100)
    assert "90% (" in told
    assert "2 processes: 1.80x the throughput of 1." in told


def test_energy_and_money_of_each_number_of_devices_are_told_where_they_are_known() -> None:
    price = Price.parse("$2/h")
    rows = [
        replace(
            on(size, 100.0 * size**0.8),
            joules_per_sample=2.0 + size,
            joules_per_sample_ci=(1.9 + size, 2.1 + size),
            price=price,
            money=Money(num_devices=size, per_million_samples=price.of(1e6, 100.0 * size**0.8, size)),
        )
        for size in (1, 2)
    ]
    words = " ".join(as_text([scaling_section(Scaling.of(rows), TECHNIQUES)], 120).split())
    assert "J/sample" in words and "4.00 ±2.5%" in words.replace("4 ±", "4.00 ±")
    assert "A million samples cost $5.56 on 1. A million samples cost $6.38 on 2." in words


def measured(config: dict[str, Any], samples_per_s: float) -> dict[str, Any]:
    return {
        "config": config,
        "samples_per_s": samples_per_s,
        "samples_per_s_ci": (samples_per_s * 0.98, samples_per_s * 1.02),
        "peak_bytes": 100 * MIB,
        "step_s": 0.1,
        "num_processes": 3,
    }


def result(*, device: str = "cuda:0", answer: dict[str, Any] = ANSWER) -> Result:
    return Result(
        config=answer,
        samples_per_s=250.0,
        samples_per_s_ci=(240.0, 260.0),
        peak_bytes=150 * MIB,
        goal=Goal(memory_limit_bytes=1000 * MIB, headroom=0.05, objective="throughput"),
        baseline=Measured(**measured(BASELINE, 180.0)),
        speedup=1.4,
        speedup_ci=(1.3, 1.5),
        verdict="faster",
        subject=Subject(device=device, num_processes=2, model="model.py"),
    )


def section(one: OneDevice, found: Result) -> Section:
    return one_device_section(found, one, Measured(**measured(found.config, found.samples_per_s)), TECHNIQUES)


def told(one: OneDevice, found: Result | None = None) -> str:
    return " ".join(as_text([section(one, found or result())], 160).split())


def test_one_device_is_beside_the_baseline_and_the_answer_of_several() -> None:
    words = told(OneDevice(**measured(ALONE, 100.0), **FOUND))
    assert "1 100 ±2.0% 100% 100 MiB batch 8 x4 baseline" in words
    assert "2 180 ±2.0% 90% (85% to 95%) 100 MiB batch 8 x2 baseline" in words
    assert "batch 16, bf16 answer" in words
    assert "The baseline trains 1.80x (95% interval 1.70x to 1.90x) as fast on 2 as on 1." in words
    assert "The answer on 2 trains 2.50x (95% interval 2.40x to 2.60x) as fast as the baseline on 1." in words
    assert "The fastest config of one device was not searched; --devices 1,2 does that." in words


def test_an_answer_that_is_the_baseline_has_no_row_of_its_own() -> None:
    words = told(OneDevice(**measured(ALONE, 100.0), **FOUND), result(answer=BASELINE))
    assert "answer" not in words
    assert "as fast on 2 as on 1" in words


@pytest.mark.parametrize(("device", "shared"), [("cpu", True), ("cuda:0", False)])
def test_processes_on_a_cpu_are_told_to_share_it(device: str, shared: bool) -> None:
    words = told(OneDevice(**measured(ALONE, 100.0), **FOUND), result(device=device))
    assert ("a process alone has all its cores, so an efficiency of 50% is no loss" in words) is shared


def test_steps_of_unequal_size_are_told_where_no_global_batch_keeps_them_equal() -> None:
    alone = {**ALONE, "accumulation_steps": 2}
    words = told(OneDevice(**measured(alone, 100.0), **FOUND))
    assert "an optimizer step takes 32 samples on 2 and 16 on 1" in words
    assert "global batch" not in told(OneDevice(**measured(ALONE, 100.0), **FOUND))


def test_why_one_device_has_no_figures_is_one_sentence() -> None:
    none = {**measured(ALONE, 0.0), "peak_bytes": 0, "num_processes": 0}
    words = told(OneDevice(**none, failure="the baseline does not fit on one device: out of memory"))
    assert "1 - - - batch 8 x4 baseline" in words
    assert words.endswith("The baseline does not fit on one device: out of memory.")


def test_a_ratio_that_noise_hides_is_told_as_such() -> None:
    wide = OneDevice(**measured(ALONE, 100.0), **{**FOUND, "efficiency_ci": (0.4, 1.5)})
    assert "90% noisy" in told(wide)
    assert "The baseline trains 1.80x (too noisy to tell more) as fast on 2 as on 1." in told(wide)


def test_it_is_a_table_of_a_page_and_survives_json() -> None:
    one = OneDevice(**measured(ALONE, 100.0), **FOUND)
    assert '<th class="number">memory of each</th>' in fragment([section(one, result())])
    kept = replace(result(), one_device=one)
    assert Result.from_dict(kept.to_dict()) == kept
