"""A ranking for each thing that a task may train: searches of their own beside the user's, with one runner, in one file.

What is learned differs between them, so nothing here chooses one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from autotune.errors import AutotuneError
from autotune.records.config import Choice
from autotune.records.result import Ranking, Result
from autotune.tuning.opening import open_search_beside
from autotune.tuning.recommend import Interrupted, NothingFeasible
from autotune.tuning.state import Search
from autotune.units import format_seconds

MIN_SHARE_S = 1.0  # of the time, below which a ranking is not begun
Answer = Callable[[Search], Result]


def add_rankings(search: Search, answer: Answer) -> Result:
    """The answer to what the user trains, and beside it a ranking for each of `search.others`, in the time that is left.

    Raises:
        NothingFeasible: what the user trains does not fit; the message says what else does.
        Interrupted: as `answer` raises it; its result has the rankings so far, those of earlier searches of the study included.
    """
    if not search.others:
        return answer(search)
    own = {name: search.history.space.baseline[name] for choice in search.others for name in choice}
    before = search.store.facts.result
    result: Result | None = None
    failure = ""
    try:
        result = answer(search)
    except NothingFeasible as error:  # something else may fit
        failure = str(error)
    except Interrupted as ended:
        if ended.result is None:
            raise
        result = ended.result
    rankings = [_ranking(search, own, result, failure)]
    try:
        for number, choice in enumerate(search.others):
            if search.interrupted():
                break
            left_s = search.options.budget_s - search.budget.elapsed_s
            rankings.append(_beside(search, {**own, **choice}, answer, left_s / (len(search.others) - number)))
    except KeyboardInterrupt:  # the second one; what is measured so far is kept
        pass
    if result is None:
        found = [f"{in_words(r.choice)} reaches {r.samples_per_s:.3g} samples/s" for r in rankings if r.samples_per_s]
        said = "; ".join([failure, *found])
        search.store.keep(no_answer=said)
        raise NothingFeasible(said)
    if search.interrupted() and before is not None:
        reached = {ranking.study for ranking in rankings}
        rankings += [ranking for ranking in before.rankings if ranking.study not in reached]
    if (kept := search.store.facts.result) is not None:
        shown = rankings if kept == result else [*kept.rankings[:1], *rankings[1:]]  # an earlier answer that stays
        search.store.keep(result=replace(kept, rankings=tuple(shown)))
    result = replace(result, rankings=tuple(rankings))
    if search.interrupted():
        raise Interrupted(result)
    return result


def in_words(choice: Mapping[str, Choice]) -> str:
    """What is trained, as options of a search."""
    return " ".join(f"{name}={value}" for name, value in choice.items())


def _beside(search: Search, choice: Mapping[str, Choice], answer: Answer, share_s: float) -> Ranking:
    """The ranking of another choice. Whatever goes wrong with it is its own."""
    changed = {name: value for name, value in choice.items() if value != search.history.space.baseline[name]}
    study = search.store.place.training(changed, search.runner.techniques).study
    none = Ranking(choice=dict(choice), study=study)
    if share_s < MIN_SHARE_S:
        alone = " ".join(f"--fix {name}={value}" for name, value in changed.items())
        return replace(none, failure=f"the budget was spent; give a larger --budget, or search it alone with {alone}")
    search.tell(f"{in_words(changed)}: a ranking of its own within {format_seconds(share_s)}, in the study {study}")
    try:
        with open_search_beside(search, changed, share_s) as other:
            none = _ranking(other, choice, None, "")
            try:
                return _ranking(other, choice, answer(other), "")
            except Interrupted as ended:
                return _ranking(other, choice, ended.result, "" if ended.result else "interrupted")
    except AutotuneError as error:
        return replace(none, failure=str(error))


def _ranking(search: Search, choice: Mapping[str, Choice], result: Result | None, failure: str) -> Ranking:
    facts = search.inspection.facts
    none = Ranking(
        choice=dict(choice),
        study=search.store.place.study,
        num_parameters=facts.num_parameters,
        num_trainable=facts.num_trainable,
        failure=failure,
    )
    if result is None:
        return none
    return replace(
        none,
        config=result.config,
        samples_per_s=result.samples_per_s,
        samples_per_s_ci=result.samples_per_s_ci,
        peak_bytes=result.peak_bytes,
        speedup=result.speedup,
        speedup_ci=result.speedup_ci,
        verdict=result.verdict,
        confirmed=result.play_off.confirmed,
        evaluation=result.evaluation,
    )
