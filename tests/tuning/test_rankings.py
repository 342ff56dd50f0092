"""Rankings beside the user's own: each in its own study and its own share of the time, whatever becomes of the others."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import ConfigError
from autotune.records.device import Slot
from autotune.records.inspection import Inspection, Support
from autotune.records.options import SearchOptions
from autotune.records.outcome import Kind, Outcome
from autotune.records.result import Result
from autotune.report.answer import answer_sections
from autotune.report.terminal import as_text
from autotune.runners.jobs import InspectJob, Job
from autotune.runners.runner import Stated
from autotune.study.place import place_of
from autotune.study.reading import load_study
from autotune.techniques import find_techniques
from autotune.tuning.events import Listener
from autotune.tuning.opening import open_search
from autotune.tuning.recommend import Interrupted, NothingFeasible
from autotune.tuning.search import search
from autotune.tuning.sweep import _trained_choices
from tests.closed_form import MIB, ClosedFormRunner, inspection

PARAMETERS = {"large": 10**9, "base": 2 * 10**6, "small": 3000}


class Variants(ClosedFormRunner):
    """Three architectures. The large one does not fit, the broken one does not run, the small one is twice as fast."""

    names: tuple[str, ...] = ("base", "small")

    def result_of(self, job: Job[Any]) -> Any:
        return (
            self.inspected(str(job.trained.get("variant", self.names[0])))
            if isinstance(job, InspectJob)
            else super().result_of(job)
        )

    def inspected(self, name: str) -> Inspection | Outcome:
        if name == "broken":
            return Outcome(kind=Kind.ERROR, cause="build_model raised KeyError: 'broken'")
        found = inspection()
        count = PARAMETERS[name]
        return replace(
            found,
            facts=replace(found.facts, num_parameters=count, num_trainable=count),
            baseline={**found.baseline, "variant": name},
            support={**found.support, "variant": Support(choices=self.names)},
        )

    def samples_per_s(self, config: Any) -> float:
        return super().samples_per_s(config) * (2 if config["variant"] == "small" else 1)

    def peak_bytes(self, config: Any) -> int:
        return super().peak_bytes(config) + (1000 * MIB if config["variant"] == "large" else 0)


def ranked(folder: Path, *names: str, runner: Variants | None = None, **options: Any) -> Result:
    runner = runner or Variants()
    runner.names = names
    runner.stated = Stated(trained={"variant": names[0], "freeze": "none"})
    storage = str(folder / "closed.db")
    return search(None, SearchOptions(**{"num_trials": 4, "storage": storage, **options}), runner=runner)


def test_each_ranking_is_a_search_of_its_own_training(tmp_path: Path) -> None:
    result = ranked(tmp_path, "base", "small")
    own, small = result.rankings
    assert own.config == result.config and own.choice == {"variant": "base"} and own.study == "closed"
    assert small.choice == {"variant": "small"} and small.config is not None and small.config["variant"] == "small"
    assert (small.num_parameters, small.study) == (3000, "closed variant=small")
    study = load_study(tmp_path / "closed.db")  # the user's own: the others are beside it
    assert study.name == "closed" and study.result == result
    assert {probe.config["variant"] for probe in study.probes} == {"base"}
    beside = load_study(tmp_path / "closed.db", study="closed variant=small")
    assert beside.result is not None and beside.result.speedup == small.speedup and not beside.result.rankings


@dataclass(kw_only=True)
class Compiling(Variants):
    """Notes in which folder what a probe compiles would be kept."""

    folder: Path = Path()
    compiled: set[tuple[Any, Path]] = field(default_factory=set)

    def keep_compiled(self, folder: Path) -> None:
        self.folder = folder

    def outcome_of(self, config: Any, settings: Any) -> Any:
        self.compiled.add((config["variant"], self.folder))
        return super().outcome_of(config, settings)


def test_each_ranking_compiles_into_a_folder_of_its_own_study(tmp_path: Path) -> None:
    runner = Compiling()
    own, _ = ranked(tmp_path, "base", "small", runner=runner).rankings
    place = place_of(str(tmp_path / "closed.db"), own.study, "closed")
    beside = place.training({"variant": "small"}, find_techniques()).compiled
    assert runner.compiled == {("base", place.compiled), ("small", beside)}
    assert runner.folder == place.compiled, "the user's own search goes on"


def test_what_is_fixed_or_excluded_is_not_ranked(tmp_path: Path) -> None:
    fixed = ranked(tmp_path, "base", "small", fix={"variant": "small"})
    assert (fixed.config["variant"], fixed.study, fixed.rankings) == ("small", "closed variant=small", ())
    assert ranked(tmp_path, "base", "small", exclude=("variant",)).rankings == ()


def test_what_is_fixed_as_the_baseline_has_it_is_the_users_own(tmp_path: Path) -> None:
    assert ranked(tmp_path, "base", "small", fix={"freeze": "none", "variant": "base"}).study == "closed"
    assert load_study(tmp_path / "closed.db").name == "closed"


def test_what_is_fixed_as_the_baseline_has_it_goes_on_with_the_users_own(tmp_path: Path) -> None:
    first = ranked(tmp_path, "base", "small")
    runner = Variants()
    runner.stated = Stated(trained={"variant": "base", "freeze": "none"})
    options = SearchOptions(storage=str(tmp_path / "closed.db"), fix={"freeze": "none"})
    with open_search(None, options, runner, Listener()) as opened:
        assert opened.store.place.study == "closed" and opened.answer_before == first


def test_what_was_searched_alone_within_a_limit_goes_on_where_the_users_own_has_another(tmp_path: Path) -> None:
    alone = {"fix": {"variant": "small"}, "memory_limit_bytes": 800 * MIB}
    first = ranked(tmp_path, "base", "small", **alone)
    own = ranked(tmp_path, "base", "small", exclude=("variant",), memory_limit_bytes=900 * MIB)
    assert (first.study, own.study) == ("closed variant=small", "closed")
    again = ranked(tmp_path, "base", "small", **alone)
    assert again.study == first.study and again.memory_limit_bytes == 800 * MIB


def test_names_of_studies_do_not_depend_on_the_order_in_which_it_is_said_what_is_trained() -> None:
    place = place_of("closed.db", None, "closed")
    expected = "closed variant=small freeze=0"
    assert (
        place.training({"freeze": "0"}, find_techniques()).training({"variant": "small"}, find_techniques()).study
        == expected
    )


@pytest.mark.parametrize("alone_first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_is_searched_alone_is_the_ranking_beside_the_users_own(tmp_path: Path, alone_first: bool) -> None:
    """Whatever is free at the time: each search finds another memory limit, and goes on with the one of its study."""

    class Elsewhere(Variants):
        free_bytes = 900 * MIB

        def slots(self) -> tuple[Slot, ...]:
            Elsewhere.free_bytes += 1
            return tuple(
                replace(slot, device=replace(slot.device, free_bytes=self.free_bytes)) for slot in super().slots()
            )

    fix = {"variant": "small"}
    if alone_first:
        alone = ranked(tmp_path, "base", "small", runner=Elsewhere(), fix=fix)
        assert load_study(tmp_path / "closed.db").name == alone.study == "closed variant=small"
        assert alone.trained == fix
    for fixed in ({}, fix, {}):
        result = ranked(tmp_path, "base", "small", runner=Elsewhere(), fix=fixed)
    _, small = result.rankings
    assert (small.study, small.failure) == ("closed variant=small", "")
    study = load_study(tmp_path / "closed.db")
    assert (study.name, study.result) == ("closed", result)


def test_a_training_that_fails_is_told_and_costs_the_others_nothing(tmp_path: Path) -> None:
    result = ranked(tmp_path, "base", "broken", "large", "small")
    _, broken, large, small = result.rankings
    assert "KeyError: 'broken'" in broken.failure and broken.config is None
    assert large.failure and large.num_parameters == 10**9 and small.samples_per_s
    text = " ".join(as_text(answer_sections(result, find_techniques()), 120).split())
    assert "variant broken build_model raised KeyError" in text and "3 k 3 k" in text
    assert "their accuracy was not compared: none is the winner" in text


def test_where_the_users_own_does_not_fit_what_does_is_named(tmp_path: Path) -> None:
    with pytest.raises(NothingFeasible, match=r"out of memory.*; variant=small reaches \d+ samples/s"):
        ranked(tmp_path, "large", "small")


def test_an_interrupted_search_keeps_the_rankings_so_far(tmp_path: Path) -> None:
    class Interrupting(Variants):
        def outcome_of(self, config: Any, settings: Any) -> Outcome:
            if config["variant"] == "small" and not any(c["variant"] == "small" for c in self.configs):
                os.kill(os.getpid(), signal.SIGINT)
            return super().outcome_of(config, settings)

    with pytest.raises(Interrupted) as raised:
        ranked(tmp_path, "base", "small", "large", runner=Interrupting())
    own, small = raised.value.result.rankings
    assert own.confirmed and small.choice == {"variant": "small"} and not small.confirmed
    assert load_study(tmp_path / "closed.db").result == raised.value.result


def test_a_search_that_is_interrupted_before_its_answer_keeps_the_rankings_of_earlier_ones(tmp_path: Path) -> None:
    class Interrupting(Variants):
        def outcome_of(self, config: Any, settings: Any) -> Outcome:
            if not self.configs:
                os.kill(os.getpid(), signal.SIGINT)
            return super().outcome_of(config, settings)

    first = ranked(tmp_path, "base", "small")
    with pytest.raises(Interrupted) as raised:
        ranked(tmp_path, "base", "small", runner=Interrupting())
    own, small = raised.value.result.rankings
    assert (own.config, own.confirmed) == (raised.value.result.config, False)
    assert small == first.rankings[1]
    assert load_study(tmp_path / "closed.db").result == first


def test_a_ranking_without_time_says_how_to_get_it(tmp_path: Path) -> None:
    class Slow(Variants):
        def now_s(self) -> float:
            return 10.0 * len(self.configs)

    *_, last = ranked(tmp_path, "base", "small", runner=Slow(), budget_s=10.0).rankings
    assert last.failure == "the budget was spent; give a larger --budget, or search it alone with --fix variant=small"


def test_each_ranking_has_a_batch_size_for_evaluation_of_its_own(tmp_path: Path) -> None:
    class Evaluating(Variants):
        def evaluated(self, config: Any) -> Outcome:
            """The base model holds ten times the small one's activations."""
            larger = {"base": 10, "small": 1}[str(config["variant"])]
            return super().evaluated(config.replace(batch_size=larger * config.batch_size))

    result = ranked(tmp_path, "base", "small", "broken", runner=Evaluating(), eval=True)
    own, small, broken = result.rankings
    assert own.evaluation == result.evaluation is not None and small.evaluation is not None
    assert (own.evaluation.eval_batch_size, small.evaluation.eval_batch_size) == (6, 48)
    assert broken.evaluation is None
    assert load_study(tmp_path / "closed.db").result == result
    text = " ".join(as_text(answer_sections(result, find_techniques()), 160).split())
    assert "gain eval batch what is trained" in text
    assert "eval batch" not in as_text(
        answer_sections(ranked(tmp_path / "other", "base", "small"), find_techniques()), 160
    )


def test_a_table_is_of_one_training() -> None:
    assert _trained_choices({"variant": ("small",), "batch_size": (4, 8)}, find_techniques()) == {"variant": "small"}
    with pytest.raises(ConfigError, match="sweep each into a table of its own, with --grid variant=base"):
        _trained_choices({"variant": ("base", "small")}, find_techniques())
