"""How far a probe has come is told at once where it is news, and else a few times a second."""

import pytest

from autotune.probe.timing import Reporter


@pytest.fixture
def sent():
    return []


@pytest.fixture
def reporter(sent):
    return Reporter(sent.append, lambda: 7, batch_size=4)


def test_every_stage_and_the_first_micro_step_are_told_at_once(reporter, sent):
    reporter.enter("warmup")
    reporter.trained(0.5, 1, tells_speed=False)
    reporter.enter("timing")
    assert [(p.stage, p.num_micro_steps, p.train_s) for p in sent] == [
        ("warmup", 0, 0.0),
        ("warmup", 1, 0.5),
        ("timing", 1, 0.5),
    ]


def test_a_thousand_quick_steps_are_few_messages(reporter, sent):
    reporter.enter("timing")
    for _ in range(1000):
        reporter.trained(1e-6, 1, tells_speed=True)
    assert len(sent) < 10
    reporter.enter("end")
    assert sent[-1].num_micro_steps == 1000


def test_the_speed_is_that_of_the_fastest_micro_step_after_the_first_step(reporter, sent):
    reporter.trained(0.1, 1, tells_speed=False)
    assert sent[-1].samples_per_s_high is None
    reporter.trained(2.0, 1, tells_speed=True)
    reporter.trained(2.0, 2, tells_speed=True)
    reporter.trained(9.0, 0, tells_speed=True)  # an update
    reporter.enter("timing")
    assert sent[-1].samples_per_s_high == 4.0
    assert sent[-1].train_s == pytest.approx(13.1)


def test_memory_is_asked_for_once_something_was_trained(reporter, sent):
    reporter.enter("warmup")
    reporter.trained(0.1, 1, tells_speed=False)
    assert [progress.peak_bytes for progress in sent] == [0, 7]
