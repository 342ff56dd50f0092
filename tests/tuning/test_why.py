"""Why this answer: what each technique did by itself and how sure that is, what limits it, and why nothing fits."""

from dataclasses import replace

import pytest

from autotune.records.measured import front_of
from autotune.records.objective import Memory, Throughput
from autotune.records.outcome import Kind, Outcome
from autotune.records.result import DeviceUse
from autotune.records.study import PLAY_OFF, Trial
from autotune.study import figures
from autotune.techniques import find_techniques
from autotune.tuning import why
from tests.closed_form import measurement

techniques = find_techniques()

MIB = 2**20
OBJECTIVE = Throughput(memory_limit_bytes=1000 * MIB, headroom=0.05)


def config(batch_size, **choices):
    return techniques.complete({"batch_size": batch_size, **choices}, global_batch=96)


def probed(candidate, samples_per_s=100.0, peak_mib=500, *, feasible=True, **changes):
    found = replace(measurement(candidate, samples_per_s, peak_mib * MIB), **changes)
    outcome = Outcome(kind=Kind.OK, measurement=found)
    return Trial(number=0, stage="search", config=candidate, outcome=outcome, feasible=feasible)


def failed(candidate, kind=Kind.OOM, **changes):
    outcome = Outcome(kind=kind, cause="it did not", **changes)
    return Trial(number=0, stage="search", config=candidate, outcome=outcome, feasible=False)


def test_what_the_host_had_too_little_for_is_not_put_right_by_the_devices_limit():
    text = why.no_fit([failed(config(1), on_host=True)], OBJECTIVE)
    assert "in every probe it did not" in text and "host with more memory" in text
    assert "--memory-limit" not in text
    assert "raise --memory-limit" in why.no_fit([failed(config(1), on_host=True), failed(config(2))], OBJECTIVE)


def test_the_front_leaves_out_what_is_not_feasible():
    probes = [probed(config(4), 100, 400), probed(config(8), 150, 600), probed(config(16), 200, 990, feasible=False)]
    assert [measured.config["batch_size"] for measured in front_of(why.figures(probes, ()).values())] == [4, 8]


def test_compiling_is_won_back_in_optimizer_steps_of_all_processes_together():
    plain, compiled = probed(config(4), 100), probed(config(8), 200)
    found, other = (next(iter(why.figures([probe], ()).values())) for probe in (compiled, plain))
    assert why.break_even(100, found, other, compile_s=40.0) == (80, pytest.approx(80.0))
    assert why.break_even(400, found, other, compile_s=40.0) == (20, pytest.approx(80.0))
    assert why.break_even(100, other, found, compile_s=40.0) is None


def limiting(answer, *others, use=None, **changes):
    own = probed(answer, 100, **changes)
    return why.limiting(answer, own.outcome.measurement, [own, *others], OBJECTIVE, use)


PHASES = {"data": 0.0, "forward": 1.0, "backward": 2.0, "optimizer": 0.1}


def test_waiting_for_data_is_the_limit_when_it_takes_much_of_a_step():
    assert limiting(config(8), phases_s={**PHASES, "data": 2.0}).startswith("Data loading")


def test_memory_is_the_limit_when_throughput_still_rises_and_a_larger_batch_does_not_fit():
    text = limiting(config(8), probed(config(4), 80), failed(config(16)), phases_s=PHASES)
    assert text.startswith("Memory")


def test_memory_is_not_the_limit_when_only_far_smaller_batches_are_slower():
    text = limiting(config(8), probed(config(2), 50), probed(config(4), 99), failed(config(16)), phases_s=PHASES)
    assert text.startswith("Compute")
    text = limiting(config(8), probed(config(2), 95), failed(config(16)), phases_s=PHASES)
    assert text.startswith("Compute")  # 5 % for two doublings


@pytest.mark.parametrize("kind", [Kind.TIMEOUT, Kind.ERROR, Kind.CRASHED])
def test_memory_is_not_the_limit_when_a_larger_batch_failed_for_another_reason(kind):
    text = limiting(config(8), probed(config(4), 80), failed(config(16), kind), phases_s=PHASES)
    assert text.startswith("Compute")


def test_memory_is_not_the_limit_when_a_larger_batch_was_only_too_slow():
    slow = probed(config(16), 60, feasible=False)
    assert limiting(config(8), probed(config(4), 80), slow, phases_s=PHASES).startswith("Compute")
    large = probed(config(16), 120, 990, feasible=False)
    assert limiting(config(8), probed(config(4), 80), large, phases_s=PHASES).startswith("Memory")


def test_compute_is_the_limit_otherwise_and_only_what_was_tried_is_claimed():
    assert limiting(config(8), phases_s=PHASES).endswith("optimizer 3%.")
    assert "a larger batch was not faster" in limiting(config(8), probed(config(16), 99), phases_s=PHASES)


@pytest.mark.parametrize(
    ("flops_share", "bandwidth_share", "resource"),
    [(0.8, 0.3, "Compute"), (0.3, 0.8, "Memory bandwidth"), (0.4, 0.45, "Compute"), (0.05, 0.1, "Overhead")],
)
def test_the_limit_is_the_resource_that_a_step_comes_near_to(flops_share, bandwidth_share, resource):
    use = DeviceUse(
        arithmetic="fp32",
        flops_per_s=1e9,
        flops_share=flops_share,
        bytes_per_s=1e9,
        bandwidth_share=bandwidth_share,
    )
    assert limiting(config(8), use=use, phases_s=PHASES).startswith(resource)


def test_an_idle_gpu_is_named():
    assert limiting(config(8), phases_s=PHASES, telemetry={"gpu_utilization": 40.0}).startswith("Launching work")


def test_when_nothing_fits_it_is_said_by_how_much():
    text = why.no_fit([failed(config(1), peak_bytes=900 * MIB, attempted_bytes=400 * MIB)], OBJECTIVE)
    assert "300 MiB more" in text and "raise --memory-limit, or make the model" in text


def test_when_nothing_was_tried_that_is_said():
    text = why.no_fit([], OBJECTIVE)
    assert "no config was tried" in text and "--budget" in text and "out of memory" not in text


def test_when_everything_needs_the_headroom_the_least_need_is_said():
    text = why.no_fit([probed(config(1), peak_mib=980, feasible=False)], OBJECTIVE)
    assert "980 MiB" in text and "--headroom" in text and "--study NAME" in text


def test_what_fits_and_is_too_slow_is_not_said_to_need_more_memory():
    objective = Memory(memory_limit_bytes=1000 * MIB, headroom=0.05, baseline_samples_per_s=200.0)
    text = why.no_fit(
        [probed(config(1), 100.0, 500, feasible=False), probed(config(2), 120.0, 990, feasible=False)], objective
    )
    assert "trains 100 samples/s; expected at least 194, 97% of the baseline's" in text and "--objective memory" in text
    assert "limit" not in text


def test_what_fits_only_after_the_allocators_cache_was_emptied_is_said_to_do_so():
    text = why.no_fit([probed(config(1), peak_mib=700, feasible=False, num_alloc_retries=3)], OBJECTIVE)
    assert "takes 700 MiB" in text and "emptied its cache" in text and "--memory-limit" in text


def test_when_everything_fails_otherwise_the_causes_are_said():
    text = why.no_fit([failed(config(1), Kind.ERROR)], OBJECTIVE)
    assert "it did not" in text and "autotune probe" in text


def test_choices_that_do_not_go_together_do_not_hide_that_memory_was_short():
    short, apart = (
        failed(config(1), peak_bytes=900 * MIB, attempted_bytes=400 * MIB),
        failed(config(2), Kind.UNSUPPORTED),
    )
    assert "300 MiB more" in why.no_fit([short, apart], OBJECTIVE)
    assert "autotune probe" in why.no_fit([apart], OBJECTIVE)


def test_the_play_offs_figures_replace_a_single_probes():
    confirmed = figures.measured(config(4), [probed(config(4), 130, 400).outcome] * 5)
    known = why.figures([probed(config(4), 100, 400), probed(config(8), 95, 600)], [confirmed])
    assert known[config(4)].samples_per_s == pytest.approx(130)
    assert [measured.config["batch_size"] for measured in front_of(known.values())] == [4]


def test_figures_of_the_search_stand_beside_the_play_offs_as_if_they_were_measured_then():
    """The machine has become half as fast."""
    searched = [probed(config(4), 100, 400), probed(config(8), 120, 600), probed(config(6), 110, 500)]
    confirmed = [
        figures.measured(config(size), [probed(config(size), speed, 600).outcome] * 3)
        for size, speed in ((4, 50), (8, 60))
    ]
    known = why.figures(searched, confirmed)
    assert known[config(6)].samples_per_s == pytest.approx(55) and known[config(6)].step_s == pytest.approx(96 / 55)
    assert known[config(6)].samples_per_s_ci == pytest.approx((55 * 0.99, 55 * 1.01))
    assert [found.config["batch_size"] for found in front_of(known.values())] == [6, 8]


def test_what_failed_in_a_play_off_is_not_among_the_figures():
    again = replace(probed(config(8), 150, 990, feasible=False), stage="play-off")
    assert set(why.figures([probed(config(4)), probed(config(8), 150, 600), again], ())) == {config(4)}


def test_a_failure_that_passed_when_it_was_tried_again_is_forgotten():
    probes = [failed(config(4), Kind.CRASHED), probed(config(4), 100), replace(probed(config(4), 90), stage="play-off")]
    assert why.figures(probes, ())[config(4)].samples_per_s == 100


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [(Kind.OOM, "--headroom 15%"), (Kind.TIMEOUT, "--probe-timeout"), (Kind.CRASHED, "autotune probe")],
)
def test_what_did_not_run_again_is_named_with_the_cause_and_its_own_remedy(kind, remedy):
    outcomes = {config(8, amp="bf16"): failed(config(8), kind).outcome}
    text = why.none_again(outcomes, config(4), OBJECTIVE)
    assert f"batch_size=8, amp=bf16: {kind}: it did not" in text and remedy in text
    assert ("--study NAME" in text) == (kind is Kind.OOM)
    assert "the baseline: " in why.none_again({config(4): failed(config(4), kind).outcome}, config(4), OBJECTIVE)


def test_what_needed_the_headroom_the_second_time_is_told_from_what_ran_out_of_memory():
    text = why.none_again({config(4): probed(config(4), peak_mib=980).outcome}, config(4), OBJECTIVE)
    assert "more than the memory limit less headroom" in text and "--headroom 15%, in a new study" in text


def test_a_choice_whose_every_probe_failed_is_named_and_one_that_ran_once_is_not():
    baseline = config(8)
    tried = [
        probed(baseline),
        failed(config(8, amp="bf16"), Kind.ERROR),
        failed(config(4, amp="bf16", optimizer_impl="fused"), Kind.ERROR),
        probed(config(8, optimizer_impl="fused")),
        failed(config(48)),
        failed(config(48, amp="fp16")),
    ]
    assert {named: len(each) for named, each in why.never_ran(tried, baseline).items()} == {"amp=bf16": 2}
    assert not why.never_ran(tried[1:3], baseline), "nothing ran, so it may be anything"


def test_choices_that_failed_together_alone_are_named_together_and_one_beside_a_known_cause_is_not():
    short = {"amp": "bf16"}
    kernel = {**short, "attention": "cudnn"}
    tried = [probed(config(8)), probed(config(8, **short))]
    tried.append(failed(config(8, **kernel, expandable_segments=True), Kind.ERROR))
    assert list(why.never_ran(tried, config(8))) == ["attention=cudnn with expandable_segments=True"]
    tried.append(failed(config(4, **kernel), Kind.ERROR))
    found = why.never_ran(tried, config(8))
    assert {named: len(each) for named, each in found.items()} == {"attention=cudnn": 2}


def test_a_choice_is_not_blamed_for_a_batch_larger_than_the_training_set():
    too_few = failed(config(48, amp="bf16"), Kind.ERROR)
    too_few = replace(too_few, outcome=replace(too_few.outcome, too_few_samples=True))
    assert not why.never_ran([probed(config(8)), too_few], config(8))


def test_larger_batches_of_which_none_fits_are_not_said_to_have_been_no_faster():
    large = failed(config(16), Kind.OOM)
    said = limiting(config(8), large, phases_s=PHASES)
    assert "no larger batch that was tried fits in" in said and "not faster" not in said


def test_a_larger_batch_that_other_work_slowed_is_not_said_to_have_been_no_faster():
    large = probed(config(16), 60)
    found = replace(large.outcome.measurement, disturbances=("others held the processor",))
    disturbed = replace(large, outcome=replace(large.outcome, measurement=found))
    assert "a larger batch was not faster" in limiting(config(8), large, phases_s=PHASES)
    assert "a larger batch was not faster" not in limiting(config(8), disturbed, phases_s=PHASES)


ANSWER, BASELINE = config(8, amp="bf16"), config(4)
DISTURBED = {"disturbances": ("others held the processor for 40% of the time",)}


def played(candidate, samples_per_s, number, **changes):
    return replace(probed(candidate, samples_per_s, **changes), stage=PLAY_OFF, round=number)


def found(probes, answer=ANSWER):
    return {effect.technique: effect for effect in why.effects(answer, BASELINE, probes)}


def test_the_effect_of_a_technique_comes_from_probes_that_differ_in_it_alone():
    probes = [
        probed(ANSWER, 180, 300),
        probed(config(8), 120, 400),
        probed(config(4, amp="bf16"), 150, 250),
        probed(BASELINE, 100, 350),
    ]
    amp, batch = found(probes)["amp"], found(probes)["batch_size"]
    assert (amp.num_pairs, batch.num_pairs) == (2, 2)
    assert (amp.speed_ratio, batch.speed_ratio) == (pytest.approx(1.5), pytest.approx(1.2))
    assert amp.memory_ratio == pytest.approx((300 / 400 * 250 / 350) ** 0.5)


def test_an_effect_that_was_not_isolated_is_not_invented():
    (batch, amp) = why.effects(ANSWER, BASELINE, [probed(ANSWER), probed(BASELINE)])
    assert batch.num_pairs == amp.num_pairs == 0
    assert batch.speed_ratio is None and amp.memory_ratio is None and amp.speed_ratio_ci is None


def test_what_something_disturbed_does_not_count_where_there_are_others():
    probes = [
        probed(ANSWER, 180),
        probed(config(8), 120),
        probed(config(4, amp="bf16"), 400, **DISTURBED),
        probed(BASELINE, 100),
    ]
    amp, batch = found(probes)["amp"], found(probes)["batch_size"]
    assert amp.speed_ratio == pytest.approx(1.5) and (amp.num_pairs, amp.disturbed) == (1, False)
    assert batch.speed_ratio == pytest.approx(1.2)
    alone = found(probes[2:], answer=config(4, amp="bf16"))["amp"]
    assert alone.speed_ratio == pytest.approx(4.0) and alone.disturbed


def test_an_effect_has_an_interval_as_wide_as_equal_processes_differ():
    def of(noise):
        rounds = [
            played(one, speed * (1 + noise * (-1) ** number), number)
            for number in range(6)
            for one, speed in ((BASELINE, 100), (config(4, amp="bf16"), 150 * (1 - noise * (-1) ** number) ** 2))
        ]
        return found([probed(BASELINE, 100), probed(config(4, amp="bf16"), 150), *rounds])["amp"]

    for noise in (0.01, 0.05):
        low, high = of(noise).speed_ratio_ci
        assert low < of(noise).speed_ratio < high
    narrow, wide = (of(noise).speed_ratio_ci for noise in (0.01, 0.05))
    assert wide[1] - wide[0] > 2 * (narrow[1] - narrow[0])


def test_a_machine_that_became_slower_after_the_search_changes_no_effect():
    probes = [probed(BASELINE, 100), probed(config(8), 120), probed(ANSWER, 180)]
    rounds = [played(one, speed / 2, number) for number in range(3) for one, speed in ((BASELINE, 100), (ANSWER, 180))]
    assert found([*probes, *rounds])["amp"].speed_ratio == pytest.approx(1.5, rel=0.02)
