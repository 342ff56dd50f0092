"""Nothing is taken on trust: what single techniques do is seen before a search ends, and several at once are taken apart."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.proposers import acquisition
from autotune.proposers.acquisition import pairs_of
from autotune.proposers.one_at_a_time import TakeApart, UndoChanges
from autotune.records.config import Choice, Config, ProbeSettings
from autotune.records.inspection import Support
from autotune.records.outcome import Kind, Outcome
from autotune.records.study import Prediction, Proposal
from autotune.study.history import History
from autotune.techniques import find_techniques
from autotune.tuning.explore import explore, measure_baseline
from autotune.tuning.state import Search
from tests.closed_form import LIMIT_BYTES, ClosedFormRunner, inspection, make_search
from tests.rough_world import NoisyPeaks, rough_inspection

BUNDLE: dict[str, Choice] = {"amp": "bf16", "channels_last": True, "optimizer_impl": "fused"}


@dataclass
class World(ClosedFormRunner):
    """Every choice multiplies the speed by a figure of its own; `fails` says how configs with one of some choices end."""

    gains: dict[tuple[str, Choice], float] = field(default_factory=dict)
    fails: dict[tuple[str, Choice], Kind] = field(default_factory=dict)
    together: float = 1.0  # bf16 and channels_last get in each other's way, or need each other
    phases_s: dict[str, float] = field(default_factory=dict)

    def samples_per_s(self, config: Config) -> float:
        speed = 100.0 * config.batch_size / (config.batch_size + 1)
        for switch, gain in self.gains.items():
            speed *= gain if config[switch[0]] == switch[1] else 1.0
        both = config["amp"] == "bf16" and bool(config["channels_last"])
        return speed * (self.together if both else 1.0)

    def outcome_of(self, config: Config, settings: ProbeSettings) -> Outcome:
        outcome = super().outcome_of(config, settings)
        kinds = [kind for (name, choice), kind in self.fails.items() if config[name] == choice]
        if kinds:
            return Outcome(kind=kinds[0], cause="it did", peak_bytes=LIMIT_BYTES, wall_s=0.1)
        if outcome.measurement is not None and self.phases_s:
            outcome = replace(outcome, measurement=replace(outcome.measurement, phases_s=self.phases_s))
        return outcome


def searched(folder: Path, world: World, *first: dict[str, Choice], most: int = 40, **changes: Any) -> Search:
    """A search of at most 40 probes: the baseline, some configs, and then what is proposed."""
    options = {"inspection": rough_inspection(), "peaks": NoisyPeaks(world), **changes}
    search = make_search(folder, world, sampler="cost-model", num_trials=most, **options)
    measure_baseline(search)
    for choices in first:
        search.probe(Proposal(config=search.history.space.complete(choices)))
    explore(search, search.proposer())
    return search


def share_of_best(search: Search, world: World) -> float:
    """The best probed config's true speed over the true optimum."""
    space, usable = search.history.space, search.history.objective.usable_bytes
    fitting = [config for config in world.configs if world.peak_bytes(config) <= usable]
    return max(map(world.samples_per_s, fitting)) / world.best_samples_per_s(space, usable)


def switched(config: Config, search: Search) -> dict[str, Choice]:
    changes = config.differences(search.history.space.baseline)
    return {name: choice for name, choice in changes.items() if name in search.inspection.support}


WORLDS = {
    "the gain hides in what is held for useless": {("checkpoint_segments", n): 1.6 for n in (1, 2, 3, 6)},
    "one choice of three": {("amp", "bf16"): 0.5, ("amp", "fp16"): 1.5},
    "layout alone": {("amp", "bf16"): 0.7, ("amp", "fp16"): 0.1, ("channels_last", True): 1.5},
    "every expectation is wrong": {
        ("amp", "bf16"): 0.4,
        ("amp", "fp16"): 0.4,
        ("optimizer_impl", "fused"): 0.8,
        ("channels_last", True): 0.7,
        **{("checkpoint_segments", n): 1.3 for n in (1, 2, 3, 6)},
    },
}


@pytest.mark.parametrize("name", WORLDS)
def test_the_gain_is_found_whatever_was_expected(tmp_path: Path, name: str) -> None:
    search = searched(tmp_path, world := World(noise=0.01, gains=WORLDS[name]))
    assert share_of_best(search, world) >= 0.97


@pytest.mark.parametrize("together", [pytest.param(0.5, marks=pytest.mark.slow), 1.5])
def test_what_two_techniques_do_together_is_found(tmp_path: Path, together: float) -> None:
    gains: dict[tuple[str, Choice], float] = {("amp", "bf16"): 1.2, ("channels_last", True): 1.1}
    search = searched(tmp_path, world := World(noise=0.01, gains=gains, together=together))
    assert share_of_best(search, world) >= 0.97


def test_a_search_in_which_nothing_helps_ends_when_every_technique_was_seen_by_itself(tmp_path: Path) -> None:
    search = searched(tmp_path, world := World(noise=0.01))
    shown = pairs_of(search.history.evidence, find_techniques())
    assert {("amp", "bf16"), ("amp", "fp16"), ("optimizer_impl", "fused"), ("channels_last", True)} <= shown.keys()
    assert any(name == "checkpoint_segments" for name, _ in shown)
    assert len(world.configs) < 40


def test_however_sure_the_models_are_every_technique_is_seen_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acquisition, "ENOUGH", 2.0)  # nothing is ever worth a probe to them
    search = searched(tmp_path, world := World(gains={("channels_last", True): 1.5, ("amp", "bf16"): 0.7}))
    shown = pairs_of(search.history.evidence, find_techniques())
    assert {("amp", "bf16"), ("amp", "fp16"), ("optimizer_impl", "fused"), ("channels_last", True)} <= shown.keys()
    assert any(config["channels_last"] and config["amp"] == "off" for config in world.configs)
    assert len(world.configs) <= 10


def test_what_acts_on_next_to_nothing_of_a_step_is_not_tried(tmp_path: Path) -> None:
    """Loading takes a hundred-thousandth of a step here, so nothing that speeds it up can gain anything."""
    found = inspection(support=inspection().support | {"pin_memory": Support(choices=(False, True))})
    for loading_s, is_tried in ((1e-6, False), (0.05, True)):
        folder = tmp_path / str(is_tried)
        folder.mkdir()
        world = World(phases_s={"data": loading_s, "forward": 0.1, "optimizer": 0.01})
        search = searched(folder, world, inspection=found, most=20)
        assert any(config["pin_memory"] for config in world.configs) == is_tried
        assert "pin_memory" not in [name for (name, _), _ in search.untried().left(search.history)]


def test_a_slow_probe_of_several_new_techniques_is_taken_apart_at_once(tmp_path: Path) -> None:
    world = World(gains={("amp", "bf16"): 0.1, ("channels_last", True): 1.5})
    search = searched(tmp_path, world, BUNDLE, most=12)
    assert [len(switched(config, search)) for config in world.configs[2:4]] == [1, 1]
    assert any(config["channels_last"] and config["amp"] == "off" for config in world.configs[2:8])
    assert share_of_best(search, world) >= 0.9


@pytest.mark.parametrize(
    ("kind", "guilty"),
    [(kind, "amp") for kind in (Kind.TIMEOUT, Kind.CRASHED, Kind.ERROR, Kind.NONFINITE)]
    + [(kind, "channels_last") for kind in (Kind.CRASHED, Kind.OOM)],
)
def test_a_technique_is_not_blamed_for_what_another_did(tmp_path: Path, kind: Kind, guilty: str) -> None:
    """After a failure of three new techniques together, the others are tried without the one that caused it."""
    helpful = next(name for name in BUNDLE if name != guilty)
    world = World(fails={(guilty, BUNDLE[guilty]): kind}, gains={(helpful, BUNDLE[helpful]): 1.5})
    search = searched(tmp_path, world, BUNDLE, most=14)
    failed = [config for config in world.configs if config[guilty] == BUNDLE[guilty]]
    tried = [config for config in world.configs[2:6] if config[helpful] == BUNDLE[helpful] and config not in failed]
    assert tried and len(failed) <= 3
    assert share_of_best(search, world) >= 0.9


def test_the_others_are_not_suspected_any_more_once_one_explains_it(tmp_path: Path) -> None:
    search = make_search(tmp_path, World(gains={("amp", "bf16"): 0.1}), inspection=rough_inspection())
    measure_baseline(search)
    take_apart, space = TakeApart(search.cost_model), search.history.space
    search.probe(Proposal(config=space.complete(BUNDLE)))
    assert take_apart.propose(search.history) is not None
    search.probe(Proposal(config=space.complete({"amp": "bf16"})))
    assert take_apart.propose(search.history) is None


def test_changes_that_gain_little_are_undone_together_and_then_each_by_itself_that_which_matters_most_first(
    tmp_path: Path,
) -> None:
    gains: dict[tuple[str, Choice], float] = {("amp", "bf16"): 1.5, ("channels_last", True): 1.01}
    search = make_search(tmp_path, world := World(gains=gains), inspection=rough_inspection())
    measure_baseline(search)
    space = search.history.space
    search.probe(Proposal(config=space.complete(BUNDLE)))

    def predict(history: History, config: Config) -> Prediction:
        speed = world.samples_per_s(config)
        return Prediction(
            samples_per_s=speed,
            samples_per_s_low=speed,
            samples_per_s_high=speed,
            peak_bytes=None,
            peak_low_bytes=None,
            peak_high_bytes=None,
            chance_to_win=None,
            chance_to_fit=1.0,
            reason="",
        )

    explore(search, UndoChanges(predict=predict))
    undone = [switched(config, search) for config in world.configs[2:]]
    assert undone[0] == {"amp": "bf16"}
    assert BUNDLE.keys() - undone[1] == {"amp"} and len(undone) == 4
