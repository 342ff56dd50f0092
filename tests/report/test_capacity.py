"""A prediction as text for people."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autotune.records.capacity import GroupPrediction, MemoryPrediction, PredictedPeak
from autotune.records.config import Choice
from autotune.records.device import Communicators
from autotune.report.capacity import first_words, prediction_sections
from autotune.report.terminal import as_text
from autotune.techniques import find_techniques
from autotune.units import GIB, MIB

complete = find_techniques().complete


def peak(batch_size: int, activations_bytes: int, **choices: Choice) -> PredictedPeak:
    total_bytes = activations_bytes + 3 * GIB
    return PredictedPeak(
        config=complete({"batch_size": batch_size, **choices}, global_batch=384).as_dict(),
        peak_bytes=total_bytes,
        peak_low_bytes=int(total_bytes * 0.9),
        peak_high_bytes=int(total_bytes * 1.1),
        chance_to_fit=0.75,
        parameters_bytes=GIB // 2,
        gradients_bytes=GIB // 2,
        optimizer_bytes=GIB,
        activations_bytes=activations_bytes,
        temporaries_bytes=GIB // 4,
        allocator_bytes=GIB // 4,
        outside_bytes=GIB // 2,
        modules=(("blocks.0.feed_forward", activations_bytes // 4), ("", activations_bytes // 8)),
    )


def group(shown: PredictedPeak, *same: dict[str, Choice], fits: bool = True, **switched_on: Choice) -> GroupPrediction:
    return GroupPrediction(switched_on=switched_on, same_memory=same, peak=shown, fits=fits, bounded=False)


PLAIN = group(peak(32, 60 * GIB), {"optimizer_impl": "fused"})
BF16 = group(
    peak(64, 70 * GIB, amp="bf16"),
    {"amp": "bf16", "optimizer_impl": "fused"},
    {"amp": "bf16", "checkpoint_segments": 1},
    {"amp": "bf16", "checkpoint_segments": 1, "optimizer_impl": "fused"},
    amp="bf16",
)
TABLE = MemoryPrediction(
    task="gpt",
    device="A100 80GB",
    on_gpu=True,
    memory_limit_bytes=80 * GIB,
    headroom=0.05,
    global_batch=384,
    fits=True,
    config=None,
    groups=(PLAIN, BF16),
    untraced={},
    left_out={"channels_last": "the model has no 2-D convolution"},
    warnings=(),
    trace_s=3.0,
    wall_s=5.0,
)


def text_of(prediction: MemoryPrediction) -> str:
    text = as_text(prediction_sections(prediction, find_techniques()))
    assert max(map(len, text.splitlines())) <= 80
    return text


def flat(prediction: MemoryPrediction, **changes: Any) -> str:
    return " ".join(text_of(replace(prediction, **changes)).split())


def test_the_first_that_is_known_is_the_largest_batch_of_plain_training_and_what_it_holds() -> None:
    first = first_words(TABLE)
    assert first.startswith(
        "after 5 s: with nothing switched on, batch 32 x12 fits: 63.0 GiB of 76.0 GiB (params 512 MiB, "
    )
    none = first_words(replace(TABLE, groups=(group(peak(1, 90 * GIB), fits=False),)))
    assert "not even batch 1 x384 fits: 93.0 GiB of 76.0 GiB" in none


def test_it_says_for_what_memory_and_that_nothing_was_measured() -> None:
    assert "gpt on A100 80GB: what fits within 80.0 GiB, 5% of it kept free" in flat(TABLE)
    assert "Predicted by tracing training steps. Nothing was trained, nothing was measured." in flat(TABLE)


def test_a_row_tells_the_largest_batch_its_peak_and_how_sure_that_is() -> None:
    assert "1 32 x12 63.0 GiB 56.7 to 69.3 GiB nothing" in flat(TABLE)
    assert "2 64 x6 73.0 GiB 65.7 to 80.3 GiB bf16; same with 1 checkpoint segment" in flat(TABLE)


def test_what_makes_no_difference_anywhere_is_said_once() -> None:
    assert flat(TABLE).count("fused") == 1
    assert "The same with fused." in flat(TABLE)


def test_each_row_has_its_breakdown_and_the_columns_are_explained() -> None:
    assert "1 0.50 0.50 1.00 60.00 0.25 0.25 0.50" in flat(TABLE)
    assert "outside: outside the allocator: the CUDA context" in flat(TABLE)


def test_a_small_model_is_told_in_mebibytes() -> None:
    small = replace(PLAIN, peak=replace(PLAIN.peak, peak_bytes=GIB, activations_bytes=300 * MIB))
    assert "Breakdown MiB # params" in flat(TABLE, groups=(small,))
    assert "1 512 512 1024 300 256 256 512" in flat(TABLE, groups=(small,))


def test_the_modules_that_hold_most_of_the_activations_are_named() -> None:
    assert "Modules that hold most of the activations #1" in flat(TABLE)
    assert "15.0 GiB 25% blocks.0.feed_forward" in flat(TABLE)
    assert "(the model itself)" in flat(TABLE)


def test_modules_that_hold_next_to_nothing_are_left_out() -> None:
    modules = (*PLAIN.peak.modules, ("blocks.0.flatten", 4))
    assert "flatten" not in flat(TABLE, groups=(replace(PLAIN, peak=replace(PLAIN.peak, modules=modules)), BF16))


def test_a_combination_of_which_nothing_fits_says_so() -> None:
    text = flat(TABLE, groups=(replace(PLAIN, fits=False), BF16))
    assert "1 none fits 63.0 GiB" in text
    assert "Where none fits, the peak is that of the smallest batch." in text


def test_each_reason_for_a_combination_that_was_not_predicted_is_given_once() -> None:
    untraced = {f"model: checkpoint_segments={number}": "no time was left" for number in range(6)}
    assert "Not predicted could not be traced model: checkpoint_segments=0," in flat(TABLE, untraced=untraced)
    assert "and 2 more no time was left" in flat(TABLE, untraced=untraced)


def test_what_does_not_apply_and_what_to_beware_of_is_told() -> None:
    assert "Left out does not apply there channels_last the model has no 2-D convolution" in flat(TABLE)
    assert "! beware of accumulation" in flat(TABLE, warnings=("beware of accumulation",))


def test_one_config_is_told_to_fit_or_not_with_its_parts() -> None:
    fits = flat(TABLE, config=PLAIN.peak, groups=())
    assert "Fits: 63.0 GiB of 76.0 GiB (56.7 to 69.3 GiB in 95%, 75% to fit): batch 32 x12" in fits
    assert "60.0 GiB 95% activations kept for the backward pass" in fits
    assert "May fit: 63.0 GiB" in flat(TABLE, config=PLAIN.peak, groups=(), fits=False)
    beyond = replace(PLAIN.peak, peak_bytes=77 * GIB)
    assert "Does not fit: 77.0 GiB" in flat(TABLE, config=beyond, groups=(), fits=False)


def test_where_everything_fits_one_breakdown_is_enough_and_the_end_of_looking_is_told() -> None:
    endless = replace(PLAIN, peak=replace(PLAIN.peak, config={**PLAIN.peak.config, "batch_size": 2**16}), bounded=True)
    everything = (endless, replace(endless, switched_on={"amp": "bf16"}))
    text = flat(TABLE, groups=everything, global_batch=None)
    assert "Batches beyond 65,536 samples may fit, too; they were not looked at." in text
    assert "Breakdown #1 bytes share 512 MiB 1% parameters and buffers" in text and "params grads" not in text
    bounded = tuple(replace(group, peak=PLAIN.peak) for group in everything)
    assert "The dataset has 32 samples, so no batch is larger." in flat(TABLE, groups=bounded, global_batch=None)
    assert "larger" not in flat(TABLE, groups=bounded)


def test_it_says_whether_what_communicators_hold_was_measured_or_is_an_estimate() -> None:
    alone = flat(TABLE)
    assert "communicator" not in alone
    groups = tuple(
        replace(one, peak=replace(one.peak, num_communicators=number)) for one, number in ((PLAIN, 1), (BF16, 3))
    )
    guessed = Communicators(guess_bytes=512 * MIB)
    said = flat(TABLE, groups=groups, communicators=guessed)
    assert "buffers of collectives (1 communicator 512 MiB, an estimate; 3 communicators 1.50 GiB, an estimate)" in said
    said = flat(TABLE, groups=groups, communicators=guessed.seen(1, 300 * MIB))
    assert "(1 communicator 300 MiB, measured; 3 communicators 900 MiB, an estimate)" in said
