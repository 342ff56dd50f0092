"""What is said beside an answer."""

from types import SimpleNamespace

from autotune.records.config import World
from autotune.records.options import SearchOptions
from autotune.records.outcome import Kind, Outcome
from autotune.space import build_space
from autotune.techniques import find_techniques
from autotune.tuning.cautions import _few_rounds, other_batch
from autotune.tuning.entrant import Entrant, Standing
from autotune.tuning.search import search
from tests.closed_form import ClosedFormRunner, inspection

techniques = find_techniques()


def test_another_global_batch_is_told_in_the_samples_of_all_processes():
    alone, pair = World(), World(size=2)
    for world, old in ((alone, 4), (pair, 8)):
        baseline = techniques.complete({"batch_size": 4}, global_batch=None, world=world)
        found = inspection(global_batch=None, baseline=baseline.as_dict(), world=world)
        space, _ = build_space(found, techniques)
        search = SimpleNamespace(inspection=found, history=SimpleNamespace(space=space))
        (text,) = other_batch(SimpleNamespace(search=search, config=baseline.replace(batch_size=8)))
        assert f"takes {2 * old} samples per optimizer step where the baseline takes {old}" in text
        assert "by 2 (linear" in text and f"--global-batch {old}" in text


class RaisesAbove(ClosedFormRunner):
    """Of a model that holds so many samples at most."""

    def outcome_of(self, config, settings):
        found = super().outcome_of(config, settings)
        if config.batch_size <= 12:
            return found
        return Outcome(
            kind=Kind.ERROR, cause=f"RuntimeError: {config.batch_size} samples, expected at most 12", wall_s=0.1
        )


def test_batches_that_raise_are_told_and_no_choice_is_blamed_for_them(tmp_path):
    result = search(None, SearchOptions(storage=str(tmp_path / "closed.db"), budget_s=20.0), runner=RaisesAbove())
    told = [text for text in result.warnings if "raise" in text or "failed each time" in text]
    (text,) = told
    assert text == "batches from 16 on raise an error, and 12 ran: RuntimeError: 16 samples, expected at most 12"
    assert result.config["batch_size"] == 12


def told_of_rounds(answer_rounds, baseline_rounds, *, failed=""):
    baseline = Entrant(techniques.complete({"batch_size": 4}, global_batch=96), outcomes=dict.fromkeys(baseline_rounds))
    candidate = Entrant(
        techniques.complete({"batch_size": 8}, global_batch=96), outcomes=dict.fromkeys(answer_rounds), failed=failed
    )
    standing = Standing(
        answer=candidate,
        baseline=baseline,
        candidate=candidate,
        gain=None,
        speedup=None,
        entrants=(candidate,),
        figures={},
        num_rounds=len(baseline_rounds),
    )
    return list(_few_rounds(SimpleNamespace(standing=standing, search=SimpleNamespace(interrupted=lambda: False))))


def test_few_rounds_are_those_that_the_answer_ran_beside_the_baseline():
    (text,) = told_of_rounds([1], [0, 1])
    assert "time for only 1 round of the play-off" in text


def test_a_larger_budget_is_not_asked_for_where_nobody_is_left_to_play():
    assert told_of_rounds([0, 1], [0, 1])
    assert not told_of_rounds([0, 1], [0, 1], failed="oom")
