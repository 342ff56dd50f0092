"""What is told of an answer, also by `print(result)` and `result.summary()`, and the lines that run it: exactly what was measured."""

from __future__ import annotations

import ast
import math
import shlex
import sys
from dataclasses import replace

import pytest

from autotune.cli.parser import build_parser
from autotune.records.measured import Dropped, Measured, Rival
from autotune.records.price import Price
from autotune.records.result import DeviceUse, Money, Result
from autotune.report.answer import answer_sections, python_lines, verify_command
from autotune.report.terminal import as_text
from autotune.study.reading import Study
from autotune.techniques import find_techniques
from autotune.units import parse_bytes
from tests.report.sample_study import ANSWER, BASELINE, but

complete = find_techniques().complete


@pytest.fixture
def result(study: Study) -> Result:
    assert study.result is not None
    return study.result


def text_of(result: Result, width: int = 80) -> str:
    return as_text(answer_sections(result, find_techniques(), model="models/my gpt.py"), width)


def _flat(text: str) -> str:
    return " ".join(text.split())


def test_the_verdict_comes_with_its_interval(result: Result) -> None:
    assert "Faster: 1.73x the baseline's throughput (95% interval 1.70x to 1.77x), with 0.81x its memory." in _flat(
        text_of(result)
    )


def test_compiling_that_nothing_shows_to_be_won_back_is_not_said_to_be_lost(result: Result) -> None:
    said = "against the fastest config that compiles nothing, what was measured does not show that this is won back."
    assert said in _flat(text_of(but(result, compile_cold_s=40.0)))


def test_the_distance_from_the_devices_limits_is_told_and_tokens_where_they_are_counted(result: Result) -> None:
    assert "tokens/s" not in text_of(result) and "FLOP/s" not in text_of(result)
    use = DeviceUse(arithmetic="bf16", flops_per_s=3.1e11, flops_share=0.62, bytes_per_s=9e9, bandwidth_share=0.25)
    text = _flat(text_of(but(result, use=use, tokens_per_s=12345.6)))
    assert "310 GFLOP/s in bf16, 62% of what this device was measured to reach for such work" in text
    assert "operators move 9 GB/s, 25% of its memory's bandwidth" in text
    assert "12,346 tokens/s, as loss_weight counts" in text
    assert "More than" not in text


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"bandwidth_share": 1.3}, "caches serve a part, or the device was slower when it was measured"),
        (
            {"flops_share": 1.2},
            "the device was slower when it was measured, or its kernels suit this model better than what was measured",
        ),
        ({"flops_share": 1.2, "contention": 0.4}, "others held the device for 40% of the time when it was measured"),
    ],
)
def test_a_share_above_what_was_measured_is_told_as_such(result: Result, changes: dict[str, float], why: str) -> None:
    use = DeviceUse(arithmetic="fp32", flops_per_s=3e11, flops_share=0.6, bytes_per_s=9e9, bandwidth_share=0.2)
    assert f"More than 100%: {why}" in _flat(text_of(but(result, use=replace(use, **changes)), 200))


def test_what_is_far_more_than_the_device_was_measured_to_reach_has_no_percentage(result: Result) -> None:
    use = DeviceUse(
        arithmetic="bf16", flops_per_s=2e11, flops_share=1572.1, bytes_per_s=9e9, bandwidth_share=2.5, contention=0.47
    )
    text = _flat(text_of(but(result, use=use), 200))
    assert "in bf16, more than twice what this device was measured to reach" in text
    assert "more than twice its memory's bandwidth" in text and "others held the device for 47%" in text


def test_the_config_can_be_pasted_and_is_the_measured_one(result: Result) -> None:
    text = text_of(result)
    literal = text[text.index("{") : text.index("}") + 1]
    assert complete(ast.literal_eval(literal)) == ANSWER


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_command_that_verifies_is_one_line_that_a_shell_understands(result: Result, width: int) -> None:
    (command,) = [line for line in text_of(result, width).splitlines() if line.startswith("  autotune verify")]
    words = shlex.split(command)
    assert words[2] == "models/my gpt.py" and complete(ast.literal_eval(words[4])) == ANSWER


def test_what_was_asked_of_the_search_is_asked_again_to_run_its_answer(result: Result) -> None:
    text = text_of(but(result, asked={"device": "cpu", "global_batch": 512, "memory_limit": 2**30}), 120)
    assert 'autotune.prepare("models/my gpt.py", config, device="cpu", global_batch=512)' in text
    assert "--steps 100 --device cpu --global-batch 512 --memory-limit 1GiB" in text
    assert 'autotune.prepare("models/my gpt.py", config)' in text_of(result, 120)


def test_a_task_built_in_python_has_no_command(result: Result) -> None:
    text = as_text(answer_sections(result, find_techniques(), model=""))
    assert "autotune.prepare(task, config)" in text and "autotune verify" not in text
    assert "# task is the autotune.Task that was searched" in text


def test_what_an_integration_tuned_is_made_a_task_before_it_is_run(result: Result) -> None:
    made_by = "autotune.integrations.lightning.task_of(module, datamodule=datamodule)"
    text = as_text(answer_sections(but(result, made_by=made_by), find_techniques(), model=""))
    first, *_ = text[text.index("Run it") :].split("session =")
    assert first.split("\n")[1:-1] == [
        "  import autotune.integrations.lightning",
        "  # with what was tuned, as it was before training:",
        f"  task = {made_by}",
    ]
    assert f"--study {result.study} --to lightning" in text
    of_a_loop = but(result, made_by="autotune.integrations.loops.task_of(model, loader, loss, optimizer)")
    assert "autotune export" not in as_text(answer_sections(of_a_loop, find_techniques(), model=""))


def test_throughput_memory_and_step_stand_beside_the_baseline(result: Result) -> None:
    lines = {
        line.split()[0]: line
        for line in text_of(result, 120).splitlines()
        if line.split()[:1] in (["answer"], ["baseline"])
    }
    assert all(part in lines["answer"] for part in ("75.5 ±1.5%", "636 ms", "1.08 GiB", "batch 24 x2, bf16, fused"))
    assert all(part in lines["baseline"] for part in ("43.5 ±1.5%", "1.33 GiB", "batch 16 x3"))


def test_everything_that_explains_the_answer_is_there(result: Result) -> None:
    text = _flat(text_of(result))
    for fact in (
        "1.46 GiB, 5% of it kept free",
        "peak is 74% of the limit",
        "fp32 -> bf16",
        "1.61x",
        "not isolated",
        "Compute: a step is",
        "0.999995",
        "3.1e-03",
        "passed as reduced precision",
        "52 probes (43 ok, 5 oom, 1 timeout, 1 crashed, 1 error, 1 nonfinite)",
        "1m39s in training steps; this search took 1m58s",
        "! pin_memory has no effect",
        "batch 2 x24, bf16, 4 checkpoint segments",
        "autotune.prepare",
    ):
        assert fact in text, fact


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_but_the_command_is_wider_than_the_terminal(result: Result, width: int) -> None:
    assert all(len(line) <= width for line in text_of(result, width).splitlines() if "autotune verify" not in line)


def test_an_answer_that_is_the_baseline_says_to_keep_it(result: Result) -> None:
    assert result.baseline is not None
    kept = but(result, config=BASELINE.as_dict(), speedup=1.0, speedup_ci=None, verdict="same", effects=())
    text = text_of(kept)
    assert "Keep what you have: nothing beat the baseline beyond the noise." in text
    assert not any(line.startswith("  baseline") for line in text.splitlines())


def test_a_baseline_beside_which_nothing_ran_is_not_said_to_be_unbeaten(result: Result) -> None:
    kept = but(result, config=BASELINE.as_dict(), speedup=1.0, speedup_ci=None, verdict="same", probes=1)
    text = _flat(text_of(kept))
    assert "Keep what you have: nothing else was tried; `autotune show` lists what is not searched" in text
    assert "nothing beat" not in text


def test_the_best_that_did_not_beat_the_baseline_is_told_with_its_interval(result: Result) -> None:
    runner_up = vars(result.finalists[1])
    rival = Rival(**runner_up, speedup=1.03, speedup_ci=(0.98, 1.09))
    kept = but(result, config=BASELINE.as_dict(), speedup=1.0, speedup_ci=None, verdict="undecided", rival=rival)
    text = _flat(text_of(replace(kept, undecided="--budget 4m would be enough")))
    assert "Undecided: " in text and "--budget 4m would be enough" in text
    assert "1.03x its throughput, 95% interval 0.98x to 1.09x" in text
    noisy = replace(rival, speedup_ci=(0.5, 2.1))
    assert "too noisy to tell." in _flat(text_of(but(kept, rival=noisy)))


@pytest.mark.parametrize("objective", ["memory", "balanced"])
def test_where_memory_counts_the_memory_of_the_best_that_did_not_beat_the_baseline_is_told(
    result: Result, objective: str
) -> None:
    assert result.baseline is not None
    runner_up = {**vars(result.finalists[1]), "peak_bytes": 2 * result.baseline.peak_bytes}
    rival = Rival(**runner_up, speedup=1.5, speedup_ci=(1.45, 1.55))
    kept = but(result, config=BASELINE.as_dict(), speedup=1.0, speedup_ci=None, verdict="same", rival=rival)
    assert "memory" not in _flat(text_of(kept)).partition("Recommended")[0].partition("The best of the others")[2]
    assert "95% interval 1.45x to 1.55x, with 2.00x its memory." in _flat(text_of(but(kept, objective=objective)))


def test_the_other_verdicts_are_put_in_words(result: Result) -> None:
    assert "As fast as the baseline within the noise: 0.99x" in text_of(replace(result, verdict="same", speedup=0.99))
    assert "Slower: 0.80x" in text_of(replace(result, verdict="slower", speedup=0.8))


def test_an_answer_whose_gain_is_not_sure_is_not_called_faster(result: Result) -> None:
    unsure = replace(
        result, verdict="undecided", speedup=1.11, speedup_ci=(0.98, 1.36), undecided="its interval holds 1"
    )
    text = _flat(text_of(unsure))
    assert "Probably faster: 1.11x the baseline's throughput (95% interval 0.98x to 1.36x)" in text
    assert "Not sure: its interval holds 1." in text and "Faster: " not in text
    assert "Undecided whether faster or slower: 0.98x" in _flat(text_of(replace(unsure, speedup=0.98)))


def test_a_sure_gain_of_an_unsure_size_is_told_with_its_least(result: Result) -> None:
    text = _flat(text_of(replace(result, speedup=3.0, speedup_ci=(1.3, 7.0))))
    assert "Faster: at least 1.30x the baseline's throughput (95% sure)" in text and "too noisy" not in text


def test_without_a_baseline_that_runs_no_speed_up_is_claimed(result: Result) -> None:
    text = _flat(text_of(replace(result, baseline=None, speedup=None, speedup_ci=None)))
    assert "Runs where the baseline does not, so the speed-up is unknown. The warnings say why." in text


def test_an_unconfirmed_answer_says_so(result: Result) -> None:
    """Once: where the verdict says why it is not sure, that is it."""
    unconfirmed = but(result, confirmed=False, finalists=(), checks=())
    text = _flat(text_of(unconfirmed))
    assert "Not confirmed" in text and "Play-off" not in text
    why = "no round of the play-off was completed, so each figure is from one process"
    text = _flat(text_of(replace(unconfirmed, verdict="undecided", undecided=why)))
    assert text.count(why) == 1 and "Faster" not in text
    nothing_else = {"baseline": None, "speedup": None, "speedup_ci": None}
    text = _flat(text_of(replace(unconfirmed, verdict="undecided", undecided=why, **nothing_else)))
    assert "the baseline did not" in text and text.count(why) == 1


def test_what_failed_in_the_play_off_is_in_its_table_with_the_reason(result: Result) -> None:
    ran_once = Dropped(**vars(result.finalists[1]), dropped="oom: needs 1920 MiB of 1500 MiB")
    never = replace(
        ran_once, config=complete({"batch_size": 48}).as_dict(), num_processes=0, dropped="crashed: SIGSEGV"
    )
    text = text_of(but(result, finalists=(result.finalists[0], never, ran_once)), 120)
    table = text[text.index("Play-off") : text.index("The answer's peak")]
    rows = [" ".join(line.split()) for line in table.splitlines()]
    assert "dropped - - - 0 batch 48 crashed: SIGSEGV" in rows
    (row,) = [row for row in rows if row.endswith("batch 16 x3, bf16, fused oom: needs 1920 MiB of 1500 MiB")]
    assert row.startswith("dropped ") and "±" in row
    assert " 2. " not in table and rows[-2].startswith("baseline")


def test_a_speed_that_is_not_of_the_rounds_is_said_to_be_of_the_search(result: Result) -> None:
    told = "the speed is its probe's, in the search: other work disturbed each run here"
    assert told not in _flat(text_of(result))
    assert result.baseline is not None
    text = text_of(replace(result, baseline=replace(result.baseline, by_probe=True)), 200)
    (row,) = [line for line in text.splitlines() if told in line]
    assert row.split()[0] == "baseline"


def test_where_the_play_off_gave_no_answer_its_rows_stand_apart_from_those_of_the_search(result: Result) -> None:
    failed = Dropped(**vars(result.finalists[1]), dropped="oom: needs 1920 MiB of 1500 MiB")
    unconfirmed = but(result, confirmed=False, verdict="undecided", undecided="all failed", finalists=(failed,))
    measured, _, played = text_of(unconfirmed, 120).partition("Play-off without an answer")
    measured = measured.partition("Measured")[2]
    assert "dropped" not in measured and "not confirmed by a play-off" in measured
    assert [line.split()[0] for line in measured.splitlines()[2:4]] == ["answer", "baseline"]
    assert "dropped" in played and "oom: needs 1920 MiB" in played
    assert "answer" not in played.partition("dropped")[0].partition("config")[2]


def test_an_interval_from_one_round_is_called_unknown(result: Result) -> None:
    text = _flat(text_of(replace(result, speedup_ci=(0.0, math.inf))))
    assert "from one round, so its interval is unknown" in text and "inf" not in text


def test_an_interval_that_tells_nothing_is_not_told(result: Result) -> None:
    wide = replace(result.finalists[1], samples_per_s_ci=(1.0, 10_000.0))
    text = _flat(text_of(but(result, finalists=(result.finalists[0], wide))))
    assert "noisy" in text and "noisy: the interval is wider than ±50%." in text and "±6" not in text
    assert "noisy" not in text_of(result)


def test_where_no_change_was_seen_by_itself_they_are_named_without_a_table(result: Result) -> None:
    unseen = tuple(replace(effect, num_pairs=0, speed_ratio=None, memory_ratio=None) for effect in result.effects)
    text = _flat(text_of(but(result, effects=unseen)))
    assert "No change was measured alone: batch 16 -> batch 24, fp32 -> bf16, default optimizer -> fused." in text


def test_a_change_that_slowed_the_pairs_it_was_seen_in_is_not_left_unexplained(result: Result) -> None:
    assert "chosen as a whole" not in text_of(result)
    first, *others = result.effects
    text = _flat(text_of(but(result, effects=(replace(first, speed_ratio=0.93), *others))))
    assert "0.93x" in text and "The answer was chosen as a whole: a change below 1x in these pairs may gain" in text


def test_the_answers_gain_is_the_same_everywhere(result: Result) -> None:
    assert text_of(replace(result, speedup=1.62)).count("1.62x") == 2  # verdict and front
    assert "1.73x" not in text_of(replace(result, speedup=1.62))


def test_a_failed_check_is_marked_with_its_cause(result: Result) -> None:
    failed = replace(result.checks[0], passed=False, cause=("accumulation_steps",), reason="it is cut")
    assert "FAILED because of accumulation_steps, whole config" in _flat(text_of(replace(result, checks=(failed,))))


def test_it_is_said_on_how_many_samples_a_check_was_made(result: Result) -> None:
    small = replace(result.checks[0], num_samples=2)
    assert "passed as reduced precision, whole config on 2 samples" in _flat(text_of(replace(result, checks=(small,))))


def test_a_failed_check_is_marked_with_its_reason(result: Result) -> None:
    failed = replace(result.checks[0], passed=False, reason="cosine 0.91 is below 0.999")
    assert "FAILED as reduced precision, whole config; noise 2e-07 whole config: cosine 0.91 is below 0.999" in _flat(
        text_of(replace(result, checks=(failed,)))
    )


def test_a_check_that_passed_in_a_model_that_magnifies_rounding_says_so(result: Result) -> None:
    sensitive = replace(result.checks[0], gradient_cosine=0.947, reason="plain fp32 itself has 0.976")
    assert "passed as reduced precision, whole config; noise 2e-07 whole config: plain fp32 itself has 0.976" in _flat(
        text_of(replace(result, checks=(sensitive,)))
    )


def test_a_check_that_tells_little_is_marked_neither_as_passed_nor_as_failed(result: Result) -> None:
    undecided = replace(result.checks[0], passed=None, reason="tells little")
    assert "undecided as reduced precision, whole config; noise 2e-07 whole config: tells little" in _flat(
        text_of(replace(result, checks=(undecided,)))
    )


def test_what_was_never_compared_is_the_best_so_far_and_no_answer(result: Result) -> None:
    text = _flat(text_of(replace(result, unchecked="the search was interrupted"), 120))
    assert (
        "Best so far, not recommended" in text
        and "config best so far 75.5" in text
        and "Run it at your own risk" in text
    )
    assert "answer" not in text
    assert "at your own risk" not in text_of(result)


def test_text_that_looks_like_markup_is_told_as_it_is(result: Result) -> None:
    assert "use [bold]this[/bold]" in text_of(replace(result, warnings=("use [bold]this[/bold]",)))


def test_where_the_time_went_is_told(result: Result) -> None:
    text = _flat(text_of(but(result, first_probe_s=4.2, split_s={"import": 3.0, "checks": 0.0, "training": 99.1})))
    assert "took 1m58s (import 3 s, training 1m39s). The first probe began after 4.2 s." in text


def test_a_front_without_the_answer_does_not_say_that_nothing_beats_it(result: Result) -> None:
    assert "no config beats these in both" in _flat(text_of(result))
    only = next(measured for measured in result.front if measured.config == result.config)
    assert "no other config is faster or takes less memory" in _flat(text_of(replace(result, front=(only,))))
    lucky = replace(only, config={**only.config, "batch_size": 4})
    text = _flat(text_of(replace(result, front=(lucky,))))
    assert "the answer is not among them" in text and "no other config" not in text


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


CONFIG = {"batch_size": 16, "accumulation_steps": 32, "amp": "bf16"}
EVERYTHING: dict[str, str | int] = {"device": "cpu", "global_batch": 512, "memory_limit": 3 * 2**29}


def _lines(model: str, asked: dict[str, str | int], width: int = 80) -> str:
    return "\n".join(line for code in python_lines(model, asked) for line in code.lines(width))


def prepared_with(
    model: str, asked: dict[str, str | int], width: int = 80
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Run the Python lines; returns what `prepare` was called with."""
    calls = []

    class Autotune:
        @staticmethod
        def prepare(*args: object, **options: object) -> object:
            calls.append((args, options))
            return type("Session", (), {"loader": [1, 2], "step": lambda self, batch: batch})()

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "autotune", Autotune())
        exec(_lines(model, asked, width), {"config": CONFIG, "task": "the task"})
    return calls[0]


def test_nothing_is_said_of_defaults() -> None:
    assert _lines("model.py", {}).splitlines()[:2] == [
        "import autotune",
        'session = autotune.prepare("model.py", config)',
    ]
    command = """autotune verify model.py --config '{"batch_size": 16, "accumulation_steps": 32, "amp": "bf16"}' --steps 100"""
    assert verify_command(CONFIG, find_techniques(), "model.py", {}) == command


def test_what_was_asked_of_the_search_is_given_on() -> None:
    assert prepared_with("my gpt.py:task", EVERYTHING) == (
        ("my gpt.py:task", CONFIG),
        {"device": "cpu", "global_batch": 512},
    )
    options = build_parser().parse_args(
        shlex.split(verify_command(CONFIG, find_techniques(), "my gpt.py:task", EVERYTHING))[1:]
    )
    assert (options.model, options.device, options.global_batch) == ("my gpt.py:task", "cpu", "512")
    assert options.memory_limit == "1536MiB"


@pytest.mark.parametrize("limit", [2**30, 12 * 2**30, 700 * 2**20, 2**20 + 1, 25276502016, 80 * 2**40])
def test_a_memory_limit_is_given_to_the_byte(limit: int) -> None:
    words = shlex.split(verify_command(CONFIG, find_techniques(), "model.py", {"memory_limit": limit}))
    assert parse_bytes(words[words.index("--memory-limit") + 1]) == limit


def test_lines_are_wrapped_between_arguments() -> None:
    model = "a folder with many words/gpt.py"
    assert all(len(line) <= 62 for line in _lines(model, EVERYTHING, 62).splitlines())
    for width in (20, 62, 100):
        assert prepared_with(model, EVERYTHING, width) == prepared_with(model, EVERYTHING)


def test_a_name_with_quotes_and_other_letters_stays_a_name() -> None:
    name = "größtes 'mo\"dell.py"
    assert prepared_with(name, {})[0][0] == name
    assert shlex.split(verify_command(CONFIG, find_techniques(), name, {}))[2] == name


def test_a_task_built_in_python_is_run_from_there() -> None:
    assert prepared_with("", {"device": "cpu"}) == (("the task", CONFIG), {"device": "cpu"})
    assert verify_command(CONFIG, find_techniques(), "", {"device": "cpu"}) == ""


def test_an_answer_of_several_machines_has_no_command_that_one_could_run() -> None:
    on_two = {"devices": "2x4"}
    assert verify_command(CONFIG, find_techniques(), "model.py", on_two) == ""
    assert verify_command(CONFIG, find_techniques(), "model.py", {"devices": "4"}).endswith("--steps 100 --devices 4")
    assert verify_command(CONFIG, find_techniques(), "model.py", {"devices": "max:0"})  # no machines are named there


def test_an_answer_of_several_machines_is_started_on_each_of_them(result: Result) -> None:
    assumed = "which is assumed until `autotune verify 'my gpt.py' --against STUDY --steps 100` has measured it here."
    result = replace(but(result, model="my gpt.py"), play_off=replace(result.play_off, later_std=0.03, num_rechecks=0))
    assert assumed in " ".join(text_of(result, 120).split())
    text = text_of(but(result, asked={"devices": "2x4"}, num_processes=8), 120)
    assert "differs by 3.0%, which is assumed." in " ".join(text.split())
    assert "torchrun --nnodes 2 --nproc-per-node 4 " in text and "on each of 2 machines" in text
    assert "no command tries an answer for several" in text and "autotune verify models" not in text
    text = text_of(but(result, asked={"devices": "8"}, num_processes=8), 120)
    assert "torchrun --nproc-per-node 8 train.py" in text and "machines" not in text


def counted(result: Result, **changes: object) -> Result:
    """The answer with the energy of each config: a joule for each sample of the micro batch."""

    def with_energy(found: Measured) -> Measured:
        joules = float(found.config["batch_size"])
        return replace(found, joules_per_sample=joules, joules_per_sample_ci=(0.9 * joules, 1.1 * joules))

    assert result.baseline is not None
    return but(
        result,
        baseline=with_energy(result.baseline),
        finalists=tuple(map(with_energy, result.play_off.finalists)),
        front=tuple(map(with_energy, result.front)),
        joules_per_sample=24.0,
        joules_per_sample_ci=(21.6, 26.4),
        **{"energy_ratio": 1.5, "energy_ratio_ci": (1.4, 1.6), **changes},
    )


def test_energy_is_told_beside_the_speed_where_it_is_known(result: Result) -> None:
    text = text_of(counted(result), 120)
    flat = _flat(text)
    assert (
        "Faster: 1.73x the baseline's throughput (95% interval 1.70x to 1.77x), with 0.81x its memory and 1.50x its energy"
        in flat
    )
    assert "Memory/throughput/energy front no config beats these in all three" in flat
    assert any("75.5 ±1.5%" in line and "24.0 ±10%" in line for line in text.splitlines())
    assert "J/sample" not in text_of(result, 120)
    assert "24.0 J a sample" in str(counted(result))


def test_a_search_for_energy_says_first_how_much_less_it_takes(result: Result) -> None:
    thrifty = counted(result, objective="energy", verdict="thriftier", energy_ratio=0.62, energy_ratio_ci=(0.58, 0.66))
    said = "Thriftier: 0.62x the baseline's energy a sample (95% interval 0.58x to 0.66x), with 0.81x its memory and 1.73x its throughput."
    assert said in _flat(text_of(thrifty))
    assert str(thrifty).startswith("thriftier: 0.62x the baseline's energy a sample")
    open_question = counted(
        result, objective="energy", verdict="undecided", energy_ratio=0.9, energy_ratio_ci=(0.8, 1.02)
    )
    assert "Probably thriftier: 0.90x the baseline's energy" in _flat(text_of(open_question))
    wide = counted(result, objective="energy", verdict="thriftier", energy_ratio=0.3, energy_ratio_ci=(0.2, 0.5))
    assert "Thriftier: at most 0.50x the baseline's energy a sample (95% sure)" in _flat(text_of(wide))
    unconfirmed = counted(result, objective="energy", verdict="undecided", energy_ratio=None, energy_ratio_ci=None)
    assert "Undecided whether thriftier or hungrier." in _flat(text_of(unconfirmed))


def test_energy_that_is_not_known_is_one_sentence(result: Result) -> None:
    text = _flat(text_of(but(result, no_energy="root alone may read it; chmod a+r it")))
    assert text.count("energy") == 1 and "Its energy is not told: root alone may read it; chmod a+r it." in text


def test_what_a_million_samples_cost_is_told_where_there_is_a_price(result: Result) -> None:
    money = Money(num_devices=2, per_million_samples=18.4, baseline_per_million_samples=31.9)
    text = _flat(text_of(but(result, price=Price.parse("2.50 EUR/h"), money=money)))
    assert "A million samples cost 18.40 EUR instead of 31.90 EUR, at 2.50 EUR/h for each of 2 devices." in text
    assert "cost" not in _flat(text_of(result))
