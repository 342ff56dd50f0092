"""What is told of those who played: speeds that processes of theirs measured, and gains that are ratios of such speeds."""

import math
import random

import pytest

from autotune.tuning.entrant import Entrant
from autotune.tuning.evidence import Evidence, Searched
from autotune.tuning.playoff import PlayOff
from autotune.tuning.told import within_measured
from tests.benchmarks.play_off import OtherWork, World, answer_of, never_measured
from tests.tuning.test_playoff import BASE, OBJECTIVE, OTHERS_WORKED, config, ok

FAST = config(16)
SLOWED_2X = 2 * math.log(2)  # `unrest` of a process of whose time others held half


def played(rounds, searched=(), probes=()):
    """A play-off with given outcomes by round, after a search that found given figures."""
    found, probes = dict(searched), dict(probes)

    def entrant(of):
        return Entrant(of, found.get(of), probe=probes.get(of))

    made = PlayOff(entrant(BASE), lambda of, number: rounds[number][of], OBJECTIVE, seed=0)
    for of in rounds[0]:
        if of != BASE:
            made.enter(entrant(of))
    return made.play(lambda seconds, number: number < len(rounds))


def test_a_disturbed_baseline_of_the_search_does_not_raise_what_is_told():
    """313 samples/s and 2.61x were told where 241 and 237 were seen, and 120 beside them."""
    for noticed in (True, False):
        standing = played(
            [{FAST: ok(FAST, 237.0), BASE: ok(BASE, 120.0)}],
            {FAST: Searched(math.log(241.0)), BASE: Searched(math.log(59.0), unrest=SLOWED_2X * noticed)},
            {FAST: ok(FAST, 241.0), BASE: ok(BASE, 59.0, **(OTHERS_WORKED if noticed else {}))},
        )
        assert standing.answer.config == FAST
        assert standing.figures[FAST].samples_per_s == pytest.approx(237)
        assert standing.figures[BASE].samples_per_s == pytest.approx(120)
        ratio, low, high = standing.speedup
        assert ratio == pytest.approx(237 / 120) and low < ratio < high
        assert (high < 4) is noticed


def test_a_baseline_that_was_disturbed_in_the_only_round_is_told_by_its_probe_in_the_search():
    standing = played(
        [{FAST: ok(FAST, 237.0), BASE: ok(BASE, 59.0, **OTHERS_WORKED)}],
        {FAST: Searched(math.log(241.0)), BASE: Searched(math.log(120.0))},
        {FAST: ok(FAST, 241.0), BASE: ok(BASE, 120.0)},
    )
    assert standing.figures[BASE].samples_per_s == pytest.approx(120)
    assert standing.speedup[0] == pytest.approx(237 / 120)


def test_where_the_only_process_of_the_baseline_was_disturbed_little_is_known_of_the_gain():
    standing = played([{FAST: ok(FAST, 120.0), BASE: ok(BASE, 59.0, **OTHERS_WORKED)}])
    assert standing.answer.config == BASE
    _, low, high = standing.speedup
    assert low < 0.5 and high > 8
    low, high = standing.figures[BASE].samples_per_s_ci
    assert low < 59 and high > 2 * 59


def test_a_disturbed_process_among_others_changes_next_to_nothing():
    calm = [{FAST: ok(FAST, 240.0 + n), BASE: ok(BASE, 121.0 - n)} for n in range(3)]
    without = played(calm).speedup
    disturbed = {FAST: ok(FAST, 242.0), BASE: ok(BASE, 59.0, **OTHERS_WORKED)}
    assert played([calm[0], disturbed, *calm[1:]]).speedup == pytest.approx(without, rel=0.01)


def test_a_little_disturbed_process_counts_for_more_than_a_much_disturbed_one():
    logs = {"a": {n: math.log(2) for n in range(4)}, "b": {0: 0.01, 1: -0.01, 2: 0.0, 3: -0.5}}

    def gain(unrest):
        return Evidence(logs, {}, {"b": {3: unrest}}).difference("a", "b").mean

    assert math.log(2) < gain(0.7) < gain(0.02) < gain(0.0)


def test_on_a_machine_that_is_always_disturbed_the_disturbance_is_the_noise():
    logs = {"a": {0: 0.7, 1: 0.75, 2: 0.65}, "b": {0: 0.0, 1: 0.05, 2: 0.06}}
    always = Evidence(logs, {}, {key: dict.fromkeys(range(3), 1.0) for key in logs})
    assert always.difference("a", "b").ratio() == Evidence(logs, {}).difference("a", "b").ratio()


def test_who_has_not_played_is_held_against_a_search_whose_baseline_was_disturbed_with_doubt():
    logs = {
        "best": {n: math.log(237) for n in range(3)},
        "base": {0: math.log(120), 1: math.log(119), 2: math.log(121)},
    }
    slowed = Searched(math.log(59), unrest=SLOWED_2X)
    found = {"best": slowed, "base": slowed, "late": Searched(math.log(241))}
    assert Evidence(logs, found).difference("late", "best").chance_below(0.0) > 0.05
    calm = {**found, "best": Searched(math.log(120)), "base": Searched(math.log(60))}
    assert Evidence(logs, calm).difference("late", "best").chance_below(0.0) < 0.05


@pytest.mark.parametrize(
    ("measured", "gains", "told"),
    [
        ({"a": (1.9, 2.1)}, {"a": 2.0}, {"base": 0.0, "a": 2.0}),  # as estimated
        ({"a": (1.9, 2.1)}, {"a": 2.15}, {"base": -0.05, "a": 2.1}),  # the baseline's own range leaves room
        ({"a": (1.9, 2.1)}, {"a": 3.0}, {"base": -0.1, "a": 2.1}),  # more than any two processes showed
        ({"a": (1.9, 2.1)}, {"a": 1.0}, {"base": 0.1, "a": 1.9}),  # and less
        ({"a": (1.9, 2.1), "b": (1.0, 1.1)}, {"a": 2.0, "b": 0.95}, {"base": 0.05, "a": 2.05, "b": 1.0}),
        (
            {"a": (1.9, 2.1), "b": (1.0, 1.1)},
            {"a": 2.0, "b": 5.0},
            {"base": -0.1, "a": 1.9, "b": 1.1},
        ),  # the first counts
    ],
)
def test_the_nearest_that_was_measured_is_told(measured, gains, told):
    found = within_measured({"base": (-0.1, 0.1), **measured}, "base", 0.0, gains)
    assert found == pytest.approx(told)


@pytest.mark.parametrize("unseen", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(20))
def test_no_speed_is_told_that_no_undisturbed_process_measured(seed, unseen):
    """As `make bench-play-off BENCH_ARGS='--disturbed 200'` finds of whole searches. Few rounds, and much is disturbed."""
    generator, work = random.Random(f"{seed} {unseen}"), OtherWork(seen=0.4, unseen=unseen, seed=seed)
    true = {BASE: 100.0, FAST: 150.0, config(8): 120.0}

    def process(of):
        return work.beside(of, ok(of, true[of] * math.exp(generator.gauss(0, 0.1))))

    probes = {of: process(of) for of in true}
    rounds = [{of: process(of) for of in true} for _ in range(1 + seed % 4)]
    seen = {of: bool(probe.disturbances) for of, probe in probes.items()}
    searched = {
        of: Searched(math.log(probe.measurement.samples_per_s), unrest=seen[of]) for of, probe in probes.items()
    }
    standing = played(rounds, searched, probes)
    for of, figures in standing.figures.items():
        measured = work.measured(of)
        assert figures.samples_per_s <= max(measured) * (1 + 1e-9)
        assert figures.samples_per_s >= min(measured) * (1 - 1e-9) or unseen
    told, base = (standing.figures[of].samples_per_s for of in (standing.candidate.config, BASE))
    ratio, low, high = standing.speedup
    assert ratio == pytest.approx(told / base) and low <= ratio <= high


class TheBaselineFirst(OtherWork):
    """Slows the search's probe of the baseline, and the second one that it runs because of that."""

    def beside(self, config, outcome):
        self.seen = 1.0 if not self.disturbed or len(self.disturbed[BASE]) < 2 else 0.0
        return super().beside(config, outcome)


@pytest.mark.parametrize("seed", [0, 1])
def test_a_whole_search_with_time_for_one_round_tells_what_it_measured(seed):
    work = TheBaselineFirst()
    result = answer_of(World(noise=0.05, gain=2.0, seed=seed, work=work), 10.0, seed)
    assert [*work.disturbed] == [BASE] and result.num_rounds == 1
    assert never_measured(result, work) == []
    assert str(result).startswith("faster in the one round there was time for: ")


def test_a_search_without_a_round_tells_a_disturbed_baseline_with_doubt():
    work = TheBaselineFirst()
    result = answer_of(World(noise=0.05, gain=2.0, work=work), 7.0, 0)
    assert not result.confirmed and result.num_rounds == 0 and result.verdict == "undecided"
    low, high = result.baseline.samples_per_s_ci
    assert low < result.baseline.samples_per_s < high and high > min(work.disturbed[BASE]) * 1.5
    assert result.speedup > 2 and result.speedup_ci[0] < 1 and "too noisy to tell more" in str(result)
