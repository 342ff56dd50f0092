"""What a time-out says of other configs."""

from autotune.records.outcome import Bound, Kind, Outcome
from autotune.study.known_hangs import KnownHangs
from autotune.techniques import find_techniques
from tests.closed_form import measurement

techniques = find_techniques()

RAN, HUNG = Outcome(kind=Kind.OK), Outcome(kind=Kind.TIMEOUT)


def config(**choices):
    return techniques.complete({"batch_size": 4, **choices})


ALL = config(amp="bf16", channels_last=True, optimizer_impl="fused")


def test_after_a_probe_of_several_new_things_hung_they_are_taken_apart():
    hangs = KnownHangs({config(): RAN, ALL: HUNG})
    assert hangs.rules_out(ALL.replace(batch_size=8))
    assert hangs.rules_out(config(amp="bf16", channels_last=True))
    assert not hangs.rules_out(config(channels_last=True))
    assert not hangs.rules_out(config(amp="fp16"))


def test_what_ran_in_another_config_is_not_blamed():
    known = {config(): RAN, ALL: HUNG, config(channels_last=True, optimizer_impl="fused"): RAN}
    hangs = KnownHangs(known)
    assert hangs.rules_out(config(amp="bf16")) and hangs.rules_out(config(amp="bf16", batch_size=2))
    assert not hangs.rules_out(config(amp="fp16", channels_last=True))


def test_a_time_out_of_what_has_run_otherwise_rules_nothing_out():
    assert not KnownHangs({config(): RAN, config(batch_size=64): HUNG}).rules_out(config(batch_size=32))


def test_nothing_is_ruled_out_before_anything_runs():
    assert not KnownHangs({config(): HUNG}).rules_out(ALL)


def test_what_was_ended_before_it_was_shown_to_be_slow_is_not_blamed():
    ran = Outcome(kind=Kind.OK, measurement=measurement(config(), 3.0, 0))

    def rules_out_bf16(samples_per_s_high):
        ended = Outcome(kind=Kind.TIMEOUT, bound=Bound(samples_per_s_high=samples_per_s_high, peak_bytes_low=0))
        return KnownHangs({config(): ran, config(amp="bf16"): ended}).rules_out(config(amp="bf16", batch_size=2))

    assert not rules_out_bf16(4.0)
    assert rules_out_bf16(1.0) and rules_out_bf16(None)
