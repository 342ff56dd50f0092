"""What `print(result)` and `result.summary()` say."""

from __future__ import annotations

from dataclasses import replace

from autotune.report.answer import answer_sections
from autotune.report.terminal import as_text
from autotune.study.reading import Study
from autotune.techniques import find_techniques


def test_an_answer_prints_itself_in_two_lines(study: Study) -> None:
    assert study.result is not None
    gain, config = str(study.result).splitlines()
    assert gain == "faster: 1.73x the baseline (95% interval 1.70x to 1.77x), with 0.81x its memory"
    assert config.startswith("batch 24 x2, bf16") and " samples/s, " in config and "summary()" in config
    assert repr(study.result) == str(study.result)


def test_a_baseline_that_is_kept_is_said_in_two_lines_too(study: Study) -> None:
    assert study.result is not None and study.result.baseline is not None
    kept = replace(study.result, verdict="same", config=study.result.baseline.config, speedup=1.0, speedup_ci=None)
    assert str(kept).splitlines()[0] == "same" and len(str(kept).splitlines()) == 2
    alone = replace(study.result, baseline=None, speedup=None, speedup_ci=None)
    assert str(alone).splitlines()[0] == "runs where the baseline does not"


def test_the_summary_is_what_the_command_prints(study: Study) -> None:
    assert study.result is not None
    assert study.result.summary(80) == as_text(
        answer_sections(study.result, find_techniques(), model=study.result.model), 80
    )
