"""What earlier studies teach a search: where it begins, what it expects, and how it lets go of what does not hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from autotune.errors import ConfigError, StudyError
from autotune.prediction.memory import MemoryEstimate
from autotune.prediction.priors import PEAK, Lesson, Taught
from autotune.proposers.cost_model import CostModel
from autotune.proposers.taught import StartWhereOthersEnded
from autotune.records.config import Choice, Config
from autotune.records.inspection import Inspection, Support, TaskFacts
from autotune.records.options import SearchOptions
from autotune.records.outcome import Kind
from autotune.records.priors import PriorStudy, PriorTrial
from autotune.records.study import Proposal
from autotune.runners.jobs import InspectJob, Job
from autotune.runners.replay import ReplayRunner
from autotune.space import build_space
from autotune.study.priors import PriorStore
from autotune.techniques import find_techniques
from autotune.tuning.anytime import answer_so_far
from autotune.tuning.confirm import finalists_of
from autotune.tuning.explore import measure_baseline
from autotune.tuning.search import search
from autotune.tuning.teaching import in_words, with_known_setups
from tests.closed_form import MIB, ClosedFormRunner, inspection, make_search
from tests.notes import Notes
from tests.records.test_priors import CONVOLUTIONAL, here, transformer

TABLE = Path(__file__).parent.parent.parent / "tests/benchmarks/unseen/scan_unet/avx2.csv"
QUICK = {"num_trials": 6, "budget_s": 20.0}


def facts(name: str) -> TaskFacts:
    """Of a task that differs from others in its name and source."""
    return TaskFacts(name=name, source_hash=name, num_parameters=10, num_trainable=10, parameter_bytes=40)


class Seen(ClosedFormRunner):
    """A closed form whose model is seen."""

    task_name = "seen"
    global_batch: int | None = None

    def inspected(self) -> Inspection:
        return inspection(facts=facts(self.task_name), signature=transformer())

    def result_of(self, job: Job[Any]) -> Any:
        return self.inspected() if isinstance(job, InspectJob) else super().result_of(job)


class Changed(Seen):
    """The same with one more layer, in a study of its own."""

    task_name = "changed"

    def inspected(self) -> Inspection:
        return inspection(facts=facts(self.task_name), signature=transformer(blocks=5))


class Slower(Changed):
    """In which bf16 costs half of the speed."""

    def samples_per_s(self, config: Config) -> float:
        return super().samples_per_s(config) * (0.35 if config["amp"] == "bf16" else 1.0)


def run(runner: ClosedFormRunner | ReplayRunner, **options: Any) -> Notes:
    notes = Notes()
    search(None, SearchOptions(**{**QUICK, **options}), runner=runner, listener=notes)
    return notes


def store() -> PriorStore:
    return PriorStore(Path("studies"))


@pytest.fixture
def taught(short_play_off: None) -> PriorStudy:
    """What a search of `Seen` leaves."""
    run(Seen())
    (left,) = store().studies()
    return left


def test_a_search_begins_where_that_of_a_like_model_ended(taught: PriorStudy, short_play_off: None) -> None:
    runner = Changed()
    notes = run(runner)
    assert any(taught.name in text and "% alike" in text for text in notes.texts)
    best = {name: choice for name, choice in taught.answer.items() if name not in ("batch_size", "accumulation_steps")}
    assert best.items() <= runner.configs[1].items()
    assert {study.name.split()[0] for study in store().studies()} == {"seen", "changed"}


def test_no_priors_begins_without(taught: PriorStudy, short_play_off: None) -> None:
    notes = run(Changed(), no_priors=True)
    assert not any(taught.name in text for text in notes.texts)


def test_a_study_that_is_resumed_does_not_teach_itself(taught: PriorStudy, short_play_off: None) -> None:
    notes = run(Seen(), num_trials=8)
    assert not any("earlier searches taught" in text for text in notes.texts)
    assert len(store().studies()) == 1


def test_another_study_of_the_same_task_begins_where_the_first_ended(taught: PriorStudy, short_play_off: None) -> None:
    again = Seen()
    notes = run(again, study="again")
    assert any(f"{taught.name} (100% alike)" in text for text in notes.texts)
    assert again.configs[1].as_dict() == taught.answer


def test_like_names_the_only_teacher(taught: PriorStudy, short_play_off: None) -> None:
    class Stranger(Seen):
        task_name = "stranger"

        def inspected(self) -> Inspection:
            return inspection(facts=facts(self.task_name))

    notes = run(Stranger(), like="seen")
    assert any(f"{taught.name} (" in text for text in notes.texts)
    with pytest.raises(ConfigError, match="--like seen and --no-priors contradict each other"):
        run(Stranger(), like="seen", no_priors=True)
    with pytest.raises(StudyError, match="there is no study file nowhere"):
        run(Stranger(), like="nowhere")


def test_of_several_studies_in_one_file_the_most_alike_teaches_else_the_last(short_play_off: None) -> None:
    class Unlike(Seen):
        task_name = "unlike"

        def inspected(self) -> Inspection:
            return inspection(facts=facts(self.task_name), signature=CONVOLUTIONAL)

    class Unseen(Seen):
        task_name = "unseen"

        def inspected(self) -> Inspection:
            return inspection(facts=facts(self.task_name))

    def teacher(runner: ClosedFormRunner, **options: Any) -> str:
        (text,) = (text for text in run(runner, like="both.db", **options).texts if "earlier searches taught" in text)
        return text.partition("taught: ")[2].partition(" ")[0]

    for runner in (Seen(), Unlike()):
        run(runner, storage="both.db", no_priors=True)
    assert teacher(Changed()) == "seen"
    assert teacher(Unseen()) == "unlike"
    assert teacher(Seen(), storage="both.db") == "unlike", "a search that goes on does not teach itself"
    optuna.create_study(storage="sqlite:///both.db", study_name="somebody else's")
    assert teacher(Changed(), study="again") == "seen"


def test_what_misleads_costs_one_probe(taught: PriorStudy, short_play_off: None) -> None:
    def until_near(runner: ClosedFormRunner) -> int:
        best = runner.best_samples_per_s(build_space(inspection(), find_techniques())[0], 950 * MIB)
        return next(
            n for n, config in enumerate(runner.configs, start=1) if runner.samples_per_s(config) >= 0.98 * best
        )

    misled, free = Slower(), Slower()
    run(misled, num_trials=12)
    run(free, num_trials=12, no_priors=True, study="free")
    assert misled.configs[1]["amp"] == "bf16"
    assert until_near(misled) <= until_near(free) + 1


def test_a_search_that_was_misled_goes_on_as_if_it_had_not_been(taught: PriorStudy, short_play_off: None) -> None:
    misled, free = Slower(), Slower()
    run(misled, num_trials=12)
    run(free, num_trials=12, no_priors=True, study="free")
    baseline, lent, *after = misled.configs
    assert lent["amp"] == "bf16"
    assert after[:5] == [config for config in free.configs[1:] if config != lent][:5]
    assert baseline == free.configs[0]


def test_a_replay_neither_reads_nor_writes_unless_it_is_given_a_store(taught: PriorStudy, short_play_off: None) -> None:
    before = store().studies()
    notes = run(ReplayRunner(TABLE))
    assert not any("earlier searches taught" in text for text in notes.texts)
    assert store().studies() == before
    given = PriorStore(Path("given"))
    search(None, SearchOptions(**QUICK, study="told"), runner=ReplayRunner(TABLE), priors=given)
    assert [study.name.split()[0] for study in given.studies()] == ["scan_unet"]


def test_a_store_that_is_broken_is_told_and_the_search_goes_on(taught: PriorStudy, short_play_off: None) -> None:
    (file,) = store().files
    file.write_text("nonsense\n\n")
    notes = run(Changed())
    assert any("set aside" in text for text in notes.warnings)
    assert [study.name.split()[0] for study in store().studies()] == ["changed"]


def lesson(
    *trials: PriorTrial, likeness: float = 1.0, in_memory: float = 1.0, device: str = "cpu Some Processor"
) -> Taught:
    baseline = find_techniques().complete({"batch_size": 4, "accumulation_steps": 1}).as_dict()
    whole = [replace(trial, config={**baseline, **trial.config}) for trial in trials]
    study = PriorStudy(
        name="some 1",
        circumstances=here(device=device),
        baseline=baseline,
        space={"amp": ("off", "bf16", "fp16")},
        answer={},
        searched_at="",
        trials=(
            PriorTrial(config=baseline, kind=Kind.OK, speed=1.0, speed_low=0.99, speed_high=1.01, peak=1.0),
            *whole,
        ),
    )
    return Taught.by([Lesson(study, likeness, in_memory)], find_techniques())


@pytest.mark.parametrize(
    ("of_study", "of_search", "amp"),
    [
        ("throughput", "throughput", "bf16"),
        ("memory", "memory", "bf16"),
        ("memory", "throughput", "fp16"),
        ("throughput", "memory", None),
    ],
)
def test_the_answer_of_a_study_with_another_objective_is_not_what_a_search_starts_with(
    of_study, of_search, amp
) -> None:
    fast = PriorTrial(config={"amp": "fp16"}, kind=Kind.OK, speed=1.5)
    taught = lesson(fast)
    study = replace(taught.lessons[0].study, answer={**fast.config, "amp": "bf16"}, objective=of_study)
    first = Taught.by([Lesson(study, 1.0, 1.0)], find_techniques(), of_search).first
    assert (first.choices["amp"] if first else None) == amp


@pytest.mark.parametrize(
    ("there", "here", "is_lent"),
    [
        ({"amp": ("off", "bf16")}, {"amp": ("off", "bf16")}, True),
        ({"amp": ("off", "bf16")}, {"amp": ("off", "bf16", "fp16"), "inplace_activations": (False, True)}, True),
        ({"amp": ("off", "bf16")}, {"amp": ("off", "bf16"), "num_workers": (0, 1, 2)}, True),
        ({"amp": ("off", "bf16")}, {"optimizer_impl": ("default", "fused"), "compile": ("off", "default")}, True),
        ({"amp": ("off", "bf16"), "variant": ("none",)}, {"amp": ("bf16",), "variant": ("small",)}, True),
        ({"amp": ("off", "bf16")}, {"amp": ("off",)}, True),
        ({"amp": ("off", "bf16")}, {"amp": ("off", "bf16"), "keep_heap": (False, True)}, False),
        ({}, {"amp": ("off", "bf16", "fp16")}, False),
        ({}, {"amp": ("bf16",)}, False),
    ],
    ids=[
        "the same",
        "more of what rarely wins",
        "more data workers",
        "what gains little is new, and what a short search leaves out",
        "what is fixed was known",
        "its best cannot be tried",
        "a technique is new",
        "an arithmetic is new",
        "what is fixed is new",
    ],
)
def test_a_search_starts_with_the_answer_of_a_study_that_could_try_what_usually_gains_much_here(
    there: dict[str, tuple[Choice, ...]], here: dict[str, tuple[Choice, ...]], *, is_lent: bool
) -> None:
    taught = lesson(PriorTrial(config={"checkpoint_segments": 2}, kind=Kind.OK, speed=2.0))
    study = replace(taught.lessons[0].study, space=there)
    taught = replace(taught, lessons=(Lesson(study, 1.0, 1.0),))
    assert taught.first is not None, "the user has named the study"
    assert (replace(taught, choices=here).first is not None) == is_lent


def test_what_hung_or_crashed_is_to_blame_as_far_as_the_studies_are_alike() -> None:
    hung = PriorTrial(config={"compile": "default"}, kind=Kind.TIMEOUT)
    slow = PriorTrial(config={"amp": "fp16"}, kind=Kind.TIMEOUT, speed_bound=0.3)
    short = PriorTrial(config={"optimizer_impl": "fused"}, kind=Kind.OOM)
    assert dict(lesson(hung, slow, short, likeness=0.8).blame) == {("compile", "default"): 0.8}
    ran = PriorTrial(config={"compile": "default"}, kind=Kind.OK, speed=1.2)
    assert not lesson(hung, ran).blame


def test_compiling_is_expected_to_take_as_long_as_on_this_device_and_no_other() -> None:
    compiled = PriorTrial(config={"compile": "default"}, kind=Kind.OK, speed=1.2, compile_cold_s=40.0)
    found = inspection()
    found = replace(
        found, support={**found.support, "compile": Support(choices=("off",), setup_s=(("default", 15.0),))}
    )
    taught = lesson(compiled)
    known = with_known_setups(found, taught, "cpu Some Processor")
    assert known.support["compile"].setup_s == (("default", 40.0),)
    assert with_known_setups(found, taught, "cpu Another") == found


def fast(peak: float, **choices: Any) -> PriorTrial:
    """A config that was the fastest of its study, with its peak over that of the baseline."""
    return PriorTrial(config=choices, kind=Kind.OK, speed=1.5, speed_low=1.49, speed_high=1.51, peak=peak)


def config_of(**choices: Any) -> Config:
    return find_techniques().complete({"batch_size": 4, "accumulation_steps": 1, **choices})


def told_peak(taught: Taught, config: Config, baseline: Config | None = None) -> MemoryEstimate | None:
    """Of a search whose baseline takes 1000 MiB."""
    (found,) = taught.peaks([config], baseline or config_of(), 1000 * MIB, 200 * MIB)
    return found


def test_a_config_is_expected_to_take_as_much_beside_the_baseline_as_it_took_in_a_like_study() -> None:
    leaner, larger, unlike = (
        told_peak(lesson(fast(peak, amp="bf16"), in_memory=in_memory), config_of(amp="bf16"))
        for peak, in_memory in ((0.8, 1.0), (1.3, 1.0), (0.8, 0.5))
    )
    assert leaner is not None and larger is not None and unlike is not None
    assert leaner.peak_bytes == pytest.approx(800 * MIB, rel=0.01)
    assert larger.peak_bytes == pytest.approx(1300 * MIB, rel=0.01)
    assert PEAK.alike < leaner.log_std < unlike.log_std
    assert told_peak(Taught.by([], find_techniques()), config_of()) is None


def test_the_baselines_may_differ_in_their_micro_batch() -> None:
    """Sixteen samples take twice as much as four, so this search's baseline of sixteen takes as much as they do, and four half of it."""
    taught = lesson(fast(2.0, batch_size=16), fast(2.0, amp="bf16", batch_size=16))
    for config, expected in ((config_of(amp="bf16", batch_size=16), 1000), (config_of(), 500)):
        found = told_peak(taught, config, config_of(batch_size=16))
        assert found is not None and found.peak_bytes == pytest.approx(expected * MIB, rel=0.05)


def test_nothing_is_told_of_what_was_not_measured_there() -> None:
    taught = lesson(fast(0.8, amp="bf16"), PriorTrial(config={"amp": "fp16"}, kind=Kind.OOM))
    assert told_peak(taught, config_of(amp="fp16")) is None
    assert told_peak(taught, config_of(amp="bf16"), config_of(optimizer_impl="fused")) is None
    assert told_peak(lesson(fast(0.0, amp="bf16")), config_of(amp="bf16")) is None
    assert told_peak(lesson(fast(0.8, amp="a type of long ago")), config_of()) is None


@pytest.mark.parametrize(
    ("peak", "batch_sizes"),
    [
        (None, [24]),  # of the last study nothing is known
        (1.5, [48]),
        (2.6, [32]),
        (6.0, [16]),
        (30.0, [8]),  # this contradicts what the baseline says, so what needs more counts
    ],
)
def test_the_first_config_has_the_micro_batch_that_fits_by_what_it_took_there(
    peak: float | None, batch_sizes: list[int], tmp_path: Path
) -> None:
    found = make_search(tmp_path, ClosedFormRunner())
    measure_baseline(found)
    taught = lesson(fast(peak or 0.0, amp="bf16", batch_size=48))
    proposer = StartWhereOthersEnded(CostModel(lambda: None, 200 * MIB, taught=taught))
    proposed = []
    while (proposal := proposer.propose(found.history)) is not None:
        proposed.append(proposal.config.batch_size)
        found.probe(proposal)
    assert proposed == batch_sizes


def test_it_is_tried_where_the_baseline_runs_and_leaves_less_than_the_headroom(tmp_path: Path) -> None:
    taught = lesson(fast(0.8, amp="bf16", batch_size=4))
    for limit_bytes, is_tried in ((450 * MIB, True), (420 * MIB, False)):  # the baseline takes 440 MiB
        runner = ClosedFormRunner(limit_bytes=limit_bytes)
        (tmp_path / str(limit_bytes)).mkdir()
        found = make_search(tmp_path / str(limit_bytes), runner, limit_bytes=limit_bytes)
        measure_baseline(found)
        assert found.history.best is None
        proposer = StartWhereOthersEnded(CostModel(lambda: None, 200 * MIB, taught=taught))
        assert (proposer.propose(found.history) is not None) == is_tried
        found.probe(Proposal(config=config_of(batch_size=1, accumulation_steps=96)))
        assert proposer.propose(found.history) is not None, "once something runs"


class Little(ClosedFormRunner):
    """In which bf16 gains 8 %."""

    def samples_per_s(self, config: Config) -> float:
        return super().samples_per_s(config) * (1.08 / 1.4 if config["amp"] == "bf16" else 1.0)


def told(**gains: float) -> Taught:
    """By a study of the same model in which each choice of `amp` gained so much."""
    trials = [
        PriorTrial(config={"amp": choice}, kind=Kind.OK, speed=gain, speed_low=0.99 * gain, speed_high=1.01 * gain)
        for choice, gain in gains.items()
    ]
    return lesson(*trials)


@pytest.mark.parametrize(("gain", "is_believed"), [(1.08, True), (1.25, True), (2.0, False)])
def test_a_study_is_believed_once_its_best_gains_about_as_much_here(
    tmp_path: Path, gain: float, is_believed: bool
) -> None:
    searched = make_search(tmp_path, Little())
    measure_baseline(searched)
    space = searched.history.space
    searched.probe(Proposal(config=space.complete({**space.baseline.as_dict(), "amp": "bf16"})))
    taught = CostModel(lambda: None, 200 * MIB, taught=told(bf16=gain, fp16=0.9))
    untried = space.complete({**space.baseline.as_dict(), "amp": "fp16"})
    plain = searched.cost_model.predict(searched.history, untried)
    assert (taught.predict(searched.history, untried) != plain) == is_believed


def test_what_was_lent_is_what_was_probed_first_in_whichever_order_the_trials_stand(tmp_path: Path) -> None:
    searched = make_search(tmp_path, Little())
    measure_baseline(searched)
    space = searched.history.space
    lent, later = (
        space.complete({**space.baseline.as_dict(), "amp": "bf16", "batch_size": batch_size}) for batch_size in (8, 16)
    )
    for config in (lent, later):
        searched.probe(Proposal(config=config))
    history, model = searched.history, CostModel(lambda: None, 200 * MIB, taught=told(bf16=1.08))
    moved = history.as_if_probed_after(2, lent)
    assert [config for config, _ in moved.evidence][1:] == [later, lent]
    assert model.lent(moved) == model.lent(history) is not None
    assert model.propose(moved) == model.propose(history)


def test_what_failed_is_told_where_nothing_else_counts() -> None:
    hung = PriorTrial(config={"compile": "default"}, kind=Kind.TIMEOUT)
    amp = {"amp": ("off", "bf16")}
    without = replace(lesson(hung).lessons[0].study, space={})
    taught = replace(lesson(hung), lessons=(Lesson(without, 0.9, 1.0),))
    assert (
        in_words(taught) == "begins with what earlier searches taught: some 1 (90% alike); --no-priors begins without"
    )
    assert in_words(replace(taught, choices=amp)).startswith("expects to fail what failed in earlier searches: some 1")
    nothing = replace(without, trials=without.trials[:1])
    assert in_words(replace(taught, lessons=(Lesson(nothing, 0.9, 1.0),), choices=amp)) == ""


def test_what_is_told_and_what_plays_rests_on_this_studys_probes_alone(tmp_path: Path) -> None:
    searched = make_search(tmp_path, Little())
    measure_baseline(searched)
    space = searched.history.space
    searched.probe(Proposal(config=space.complete({**space.baseline.as_dict(), "amp": "bf16"})))
    plain = searched.cost_model
    believing = CostModel(lambda: None, 200 * MIB, taught=told(bf16=1.08, fp16=0.9))
    untried = space.complete({**space.baseline.as_dict(), "amp": "fp16"})
    assert believing.predict(searched.history, untried) != plain.predict(searched.history, untried)
    best, base = searched.history.best, space.baseline
    assert best is not None
    chances = [model.chance_to_be_better(searched.history, best[0], base) for model in (believing, plain)]
    assert chances[0] != chances[1]
    answer = answer_so_far(searched.history, plain, None)
    assert answer_so_far(searched.history, believing, None) == answer
    playing = finalists_of(searched)
    searched.cost_model = believing
    assert finalists_of(searched) == playing


def test_studies_that_are_hardly_alike_are_not_looked_at() -> None:
    assert lesson(PriorTrial(config={"amp": "bf16"}, kind=Kind.OK, speed=2.0), likeness=0.05).lessons == ()
    assert lesson(PriorTrial(config={"amp": "bf16"}, kind=Kind.OK, speed=2.0), likeness=0.2).first is None
