"""The study in Optuna's storage: one Optuna trial per probe, so nothing is lost and nothing is measured twice.

The play-off measures the search's best configs again. Its trials are in a separate study, so that Optuna's `best_trial`, plots
and samplers see each config of the search once.

Several searches may share a study. Who begins a trial, or the play-off, first looks at what the others have begun, while it keeps them
waiting. Every write may be repeated, since a storage that is gone for seconds does not say whether it has kept the last one.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.exceptions import OptunaError, UpdateFinishedTrialError
from optuna.storages import get_storage
from optuna.trial import FrozenTrial, TrialState, create_trial
from sqlalchemy.exc import SQLAlchemyError

from autotune.errors import StudyError
from autotune.records.config import Config
from autotune.records.objective import OBJECTIVES, Objective
from autotune.records.outcome import Outcome
from autotune.records.study import (
    DECIDING,
    PLAY_OFF,
    BegunTrial,
    EndedTrial,
    Owner,
    Prediction,
    Proposal,
    SearchFacts,
    StudyFacts,
    Trial,
)
from autotune.space import Space
from autotune.study.backends import shared_backend_of
from autotune.study.facts import FORMAT, SHARED_FORMAT, facts_of
from autotune.study.place import (
    BEAT_S,
    PLAY_OFF_OF,
    Place,
    begin_search,
    end_search,
    is_gone,
    require_equal,
    this_process,
)
from autotune.study.sharing import Watch, close_trial, persistent, running_elsewhere
from autotune.study.storage import connect, place_errors
from autotune.study.trials import distributions_of, number_of, trial_of, trials_of

CONSTRAINT = "infeasibility"
SOON_S = 5.0  # what another search is about to begin counts as begun: it waits for its turn


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What all searches of a study have found by now.

    Attributes:
        trials: every finished trial, in order.
        elsewhere: the configs that other searches run outside the play-off.
    """

    trials: list[Trial]
    elsewhere: frozenset[Config]


class Store:
    """A study opened for writing.

    Args:
        facts: what the search says of itself; its fingerprint must be the study's.
        tell: called with what the user should know of the storage.

    Raises:
        StudyError: the storage cannot be opened, is not a study, or has another fingerprint.
    """

    def __init__(self, place: Place, facts: SearchFacts, tell: Callable[[str], None] = lambda text: None) -> None:
        warnings.filterwarnings("ignore", message="The constraint value is ignored")  # a trial that is finished again
        self.place, self.tell = place, tell
        self.is_lost = False  # the storage was waited for in vain
        self.shared = shared_backend_of(place.url)
        self._running: dict[int, tuple[optuna.Study, int]] = {}  # by number: the study and the trial's id
        self._records: dict[int, Trial] = {}  # by the trial's id
        self._begun: dict[int, BegunTrial] = {}  # by the trial's id
        self._soon: dict[Config, float] = {}  # until when (s) a config counts as begun: another search was about to
        self._next_number = 0
        self._claim: int | None = None
        self._is_unsure = False  # whether the storage has kept what was created last
        self._freed: deque[str] = deque()
        self._objective = OBJECTIVES[facts.objective]
        with place_errors(place):
            freed = {"freed": self._note_freed} if self.shared is not None else {}
            self._storage = get_storage(connect(place.url, **freed))
            with self._alone():
                self._study = self._open(place.study, "fingerprint")
                self._play_off = self._find_play_off()
                known = self.facts
                if "fingerprint" in self._study.user_attrs:
                    require_equal(place, known.fingerprint, facts.fingerprint)
                now = datetime.now(UTC).isoformat()
                written = SHARED_FORMAT if self.is_shared else FORMAT
                self._write(known, {**vars(facts), "format": written, "no_answer": "", "searched_at": now})
        self._close_what_dead_searches_left()
        self._count(self._kept())
        self._beaten_s = time.monotonic()
        self._number = begin_search()
        self._watch: Watch | None = None
        if self.shared is not None:
            self._watch = Watch(self.shared, self._storage, self._studies, self._own, self.beat)

    @property
    def is_shared(self) -> bool:
        """Whether other searches may write to the study meanwhile."""
        return self.shared is not None

    def close(self) -> None:
        """Let the storage go."""
        end_search(self._number)
        if self._watch is not None:
            self._watch.close()
        if self.shared is not None:
            self.shared.close(self._storage)

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """Keep the other searches of the study waiting."""
        if self.shared is not None:
            return self.shared.alone(self._storage, self.place.study)
        return contextlib.nullcontext()

    def _alone_to_begin(self, proposal: Proposal) -> contextlib.AbstractContextManager[bool]:
        """Keep the others waiting to begin a trial. False where another search is about to begin a trial of its config."""
        if self.shared is None:
            return contextlib.nullcontext(True)
        # a trial that may be there must be taken up, whoever wants what; and only one search holds the play-off
        if self._is_unsure or proposal.stage == PLAY_OFF:
            return _certainly(self._alone())
        return self.shared.alone_to_begin(self._storage, self.place.study, str(proposal.config.as_dict()))

    def _open(self, name: str, mark: str) -> optuna.Study:
        """The study of that name, created if there is none. Our studies are recognized by the attribute `mark`."""
        study = optuna.create_study(storage=self._storage, study_name=name, direction="maximize", load_if_exists=True)
        if study.trials and mark not in study.user_attrs:  # in this order: whoever shares the study marks it first
            raise StudyError(
                f"the study {name} in {self.place.storage} was not made by autotune; use another with --study"
            )
        if study.metric_names is None:
            study.set_metric_names([self._objective.score_name()])
        return study

    def _find_play_off(self) -> optuna.Study | None:
        """The play-off's study, where there is one by now."""
        try:
            self._storage.get_study_id_from_name(self.place.play_off)
        except KeyError:
            return None
        return self._open(self.place.play_off, PLAY_OFF_OF)

    def _studies(self) -> list[optuna.Study]:
        return [study for study in (self._study, self._play_off) if study is not None]

    @property
    def _owner(self) -> Owner:
        """This search, as its trials name it."""
        return replace(this_process(), search=self._number)

    def _own(self) -> frozenset[int]:
        """The ids of this search's running trials."""
        claim = [] if self._claim is None else [self._claim]
        return frozenset([trial_id for _, trial_id in tuple(self._running.values())] + claim)

    def _note_freed(self, study: optuna.Study, trial: FrozenTrial) -> None:
        owner = BegunTrial.from_dict(trial.user_attrs).owner
        self._freed.append(f"the search {owner.words() if owner else ''} has died; what it ran is free again")

    def _close_what_dead_searches_left(self) -> None:
        """Close the trials whose controller is gone."""
        by_clock = self.shared is None or not self.shared.keeps_heartbeats
        for study in self._studies():
            for trial in running_elsewhere(study, ()):
                if is_gone(BegunTrial.from_dict(trial.user_attrs), is_shared=self.is_shared, by_clock=by_clock):
                    close_trial(self._storage, self._storage.get_trial(trial._trial_id))

    def _kept(self) -> list[FrozenTrial]:
        """The trials of both studies."""
        return [trial for study in self._studies() for trial in study.get_trials(deepcopy=False)]

    def _count(self, kept: Iterable[FrozenTrial]) -> None:
        """Take the next number above all that are taken. A search of its own gives the number of a lost trial to another one."""
        begun = [(trial, self._begun_of(trial)) for trial in kept if self._is_counted(trial)]
        numbers = (number_of(trial, about) for trial, about in begun if about.stage != DECIDING)
        self._next_number = max(self._next_number, 1 + max(numbers, default=-1))

    def _begun_of(self, trial: FrozenTrial) -> BegunTrial:
        """What was written as a trial began, its last sign of life aside. It is made out once: each look asks for all trials."""
        if trial._trial_id not in self._begun:
            self._begun[trial._trial_id] = BegunTrial.from_dict(trial.user_attrs)
        return self._begun[trial._trial_id]

    def _is_counted(self, trial: FrozenTrial) -> bool:
        return self.is_shared or trial.state is not TrialState.FAIL

    def _study_of(self, stage: str) -> optuna.Study:
        """The study that keeps the trials of a stage; the play-off's is made when it begins."""
        if stage not in (PLAY_OFF, DECIDING):
            return self._study
        if self._play_off is None:
            self._play_off = self._open(self.place.play_off, PLAY_OFF_OF)
            self._play_off.set_user_attr(PLAY_OFF_OF, self.place.study)
        return self._play_off

    @property
    @persistent
    def facts(self) -> StudyFacts:
        """What the study keeps beside its trials."""
        return facts_of(f"{self.place.study} in {self.place.storage}", self._study.user_attrs)

    @persistent
    def keep(self, **changed: Any) -> None:
        """Keep what has changed of the study's facts: fields of `StudyFacts`. Raises TypeError for another name."""
        self._write(self.facts, changed)

    def _write(self, known: StudyFacts, changed: Mapping[str, Any]) -> None:
        before, after = known.to_dict(), replace(known, **changed).to_dict()
        for name in changed:
            if after[name] != before[name]:
                self._study.set_user_attr(name, after[name])

    @persistent
    def trials(self) -> list[Trial]:
        """Every finished trial, in order."""
        return trials_of(self._kept(), self._records)

    @persistent
    def look(self) -> Seen:
        """What all searches of the study have found, and what the others do now. Tells of searches that have died."""
        if self._play_off is None:
            self._play_off = self._find_play_off()
        while self._freed:
            self.tell(self._freed.popleft())
        return self._see(self._kept(), self._own())

    def _see(self, kept: Sequence[FrozenTrial], own: Collection[int]) -> Seen:
        """What is found in all trials.

        Args:
            own: the ids of this search's.
        """
        self._count(kept)
        begun = (about for _, about in self._running_besides(own, kept))
        configs = (Config(tuple(one.config.items())) for one in begun if one.stage not in (PLAY_OFF, DECIDING))
        return Seen(trials=trials_of(kept, self._records), elsewhere=frozenset(configs) | self._begun_soon())

    def _running_besides(
        self, ids: Collection[int], kept: Iterable[FrozenTrial]
    ) -> Iterator[tuple[FrozenTrial, BegunTrial]]:
        """The running trials that are not among those of `ids`, each with what was written as it began."""
        for trial in kept:
            if trial.state is TrialState.RUNNING and trial._trial_id not in ids:
                yield trial, self._begun_of(trial)

    def _begun_soon(self) -> set[Config]:
        """What other searches were about to begin a moment ago; their trials may not be there yet."""
        now_s = time.monotonic()
        self._soon = {config: until_s for config, until_s in self._soon.items() if until_s > now_s}
        return {*self._soon}

    @persistent
    def begin(
        self, proposal: Proposal, prediction: Prediction | None, space: Space, *, num_known: int | None = None
    ) -> int | None:
        """Open a trial for a proposal and record it before it runs, so that a search that dies leaves evidence.

        Args:
            num_known: how many finished trials of its config outside the play-off the proposer knew of.

        Returns:
            The trial's number, which `finish` and `fail` take. It counts over search and play-off together. None where another search
            runs the config now, or has probed it since, or holds the play-off that the trial is for.
        """
        with self._alone_to_begin(proposal) as is_alone:
            opened = self._open_trial(proposal, prediction, space, num_known) if is_alone else None
        if not is_alone:
            self._soon[proposal.config] = time.monotonic() + SOON_S
        # not before: where the storage is lost as this ends, another attempt has to find the trial
        self._is_unsure = False
        if opened is None:
            return None
        number, self._running[number] = opened
        return number

    def _open_trial(
        self, proposal: Proposal, prediction: Prediction | None, space: Space, num_known: int | None
    ) -> tuple[int, tuple[optuna.Study, int]] | None:
        """The number of a trial for a proposal, its study and its id."""
        if self.shared is not None:
            kept = self._kept()
            left = self._left(proposal, kept) if self._is_unsure else []
            ids = [trial._trial_id for trial in left]
            seen = self._see(kept, [*self._own(), *ids])
            if proposal.stage == PLAY_OFF:
                is_free = self._claim is None or self._keeps_claim(kept)
            else:
                is_free = not _is_taken(proposal.config, num_known, seen)
            # a lock goes with its connection: another search may have begun the config before a trial of this one was written
            for trial_id in ids[1:] if is_free else ids:
                self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
            if not is_free:
                return None
            if left:
                return number_of(left[0], self._begun_of(left[0])), (self._study_of(proposal.stage), ids[0])
        number, self._next_number = self._next_number, self._next_number + 1
        begun = BegunTrial(
            number=number,
            config=proposal.config.as_dict(),
            stage=proposal.stage,
            reason=proposal.reason or (prediction.reason if prediction else ""),
            prediction=prediction,
            round=proposal.round,
            owner=self._owner,
            seen_at_s=time.time(),
        )
        study = self._study_of(proposal.stage)
        return number, (study, self._create(study, begun, space.params(proposal.config), distributions_of(space)))

    def _create(
        self, study: optuna.Study, begun: BegunTrial, params: dict[str, Any], distributions: dict[str, BaseDistribution]
    ) -> int:
        """Create a running trial, and show that its search is alive. Returns the trial's id."""
        opened = create_trial(
            state=TrialState.RUNNING, params=params, distributions=distributions, user_attrs=begun.to_dict()
        )
        self._is_unsure = True
        # a single commit, which takes a disk 20 ms; `ask` makes one for each parameter
        trial_id = self._storage.create_new_trial(self._storage.get_study_id_from_name(study.study_name), opened)
        if self.shared is not None:
            self.shared.beat(self._storage, [trial_id])
        return trial_id

    def _left(self, proposal: Proposal, kept: Iterable[FrozenTrial]) -> list[FrozenTrial]:
        """The trials that attempts before left, which did not learn that the storage has them."""
        owner, wanted = self._owner, proposal.config.as_dict()
        return [
            trial
            for trial, about in self._running_besides(self._own(), kept)
            if about.owner == owner and about.stage == proposal.stage and about.config == wanted
        ]

    def beat(self) -> None:
        """Record that the controller of the running trials is alive, where the storage keeps no heartbeats. May be called often, by
        any thread: it writes only every `BEAT_S` seconds. A trial that another search has freed meanwhile needs no sign.
        """
        now_s = time.monotonic()
        if now_s - self._beaten_s > BEAT_S and (self.shared is None or not self.shared.keeps_heartbeats):
            self._beaten_s = now_s
            for trial_id in self._own():
                with contextlib.suppress(UpdateFinishedTrialError):
                    self._storage.set_trial_user_attr(trial_id, "seen_at_s", time.time())

    @persistent
    def finish(self, number: int, outcome: Outcome, objective: Objective, *, disturbed: bool) -> Trial:
        """Record an outcome. An infeasible trial, too, becomes COMPLETE, with a constraint and the objective's worst score.

        Samplers do not see trials marked as failed, and would propose the same config again. Where another search has freed the trial
        meanwhile, because nothing was heard of this one, the outcome is kept in another trial of the same number.
        """
        study, trial_id = self._running[number]
        infeasibility = objective.infeasibility(outcome)
        feasible = infeasibility <= 0
        score = objective.score(outcome) if feasible else objective.worst()
        ended = EndedTrial(
            ended="over the limit" if outcome.ok and not feasible else str(outcome.kind),
            score=score,
            feasible=feasible,
            disturbed=disturbed,
            peak_bytes=outcome.measurement.peak_bytes if outcome.measurement else None,
            outcome=outcome,
        )
        try:
            optuna.Trial(study, trial_id).set_constraint(CONSTRAINT, infeasibility)
            for key, value in ended.to_dict().items():
                self._storage.set_trial_user_attr(trial_id, key, value)
            self._storage.set_trial_state_values(trial_id, TrialState.COMPLETE, [score])
        except UpdateFinishedTrialError:  # an attempt before, or another search, has closed it
            pass
        told = self._storage.get_trial(trial_id)
        if told.state is TrialState.FAIL:
            told = self._tell_again(study, told, ended, infeasibility)
        self._running.pop(number)
        self._records[told._trial_id] = trial_of(told)
        return self._records[told._trial_id]

    def _tell_again(
        self, study: optuna.Study, freed: FrozenTrial, ended: EndedTrial, infeasibility: float
    ) -> FrozenTrial:
        """Keep the outcome of a trial that was freed, once."""
        number = freed.user_attrs["number"]
        with self._alone():
            told = [trial for trial in study.get_trials(deepcopy=False) if trial.state is TrialState.COMPLETE]
            if same := [trial for trial in told if trial.user_attrs["number"] == number]:
                return same[0]
            again = create_trial(
                value=ended.score,
                params=freed.params,
                distributions=freed.distributions,
                user_attrs={**freed.user_attrs, **ended.to_dict()},
                constraints={CONSTRAINT: infeasibility},
            )
            study_id = self._storage.get_study_id_from_name(study.study_name)
            return self._storage.get_trial(self._storage.create_new_trial(study_id, again))

    @persistent
    def fail(self, number: int, reason: str) -> None:
        """Close a trial that the user or a fault of the machine cut short."""
        _, trial_id = self._running[number]
        with contextlib.suppress(UpdateFinishedTrialError):  # closed by an attempt before, or by another search
            self._storage.set_trial_user_attr(trial_id, "fault", reason)
            self._storage.set_trial_state_values(trial_id, TrialState.FAIL)
        self._running.pop(number)

    @property
    def holds_play_off(self) -> bool:
        """Whether the play-off is this search's, as far as it knows: one that stood still for long learns otherwise from `begin`."""
        return self.shared is None or self._claim is not None

    @persistent
    def take_play_off(self) -> bool:
        """Whether the play-off is this search's to hold. One search of a study holds it; if that dies, another may."""
        if self.holds_play_off:
            return True
        known = self._play_off
        if known is not None and not self._is_unsure and self._claims(known):  # who waits for its end asks often
            return False
        with self._alone():
            self._claim = self._open_claim(self._study_of(DECIDING))
        self._is_unsure = False
        return self._claim is not None

    def _claims(self, study: optuna.Study) -> list[FrozenTrial]:
        """What shows that another search holds the play-off, or an attempt of this one of which it knows nothing."""
        others = running_elsewhere(study, self._own())
        return [trial for trial in others if self._begun_of(trial).stage == DECIDING]

    def _open_claim(self, study: optuna.Study) -> int | None:
        """The id of the trial that shows that this search holds the play-off; None where another search does."""
        owner = self._owner
        for trial in self._claims(study):
            is_own = self._is_unsure and BegunTrial.from_dict(trial.user_attrs).owner == owner
            return trial._trial_id if is_own else None
        return self._create(study, BegunTrial(stage=DECIDING, owner=owner, seen_at_s=time.time()), {}, {})

    def _keeps_claim(self, kept: Iterable[FrozenTrial]) -> bool:
        """Whether the play-off is still this search's: if it stood still for long, it counted as dead, and another may hold it by now."""
        if any(trial._trial_id == self._claim and trial.state is TrialState.RUNNING for trial in kept):
            return True
        self._claim = self._open_claim(self._study_of(DECIDING))
        return self._claim is not None

    def leave_play_off(self) -> None:
        """Let another search hold the play-off. Where the storage does not answer, it learns that from the missing heartbeats."""
        if self._claim is not None:
            claim, self._claim = self._claim, None
            with contextlib.suppress(SQLAlchemyError, OptunaError):
                self._storage.set_trial_state_values(claim, TrialState.PRUNED)


@contextlib.contextmanager
def _certainly(alone: contextlib.AbstractContextManager[None]) -> Iterator[bool]:
    with alone:
        yield True


def _is_taken(config: Config, num_known: int | None, seen: Seen) -> bool:
    """Whether another search runs a config, or has probed it since the proposer looked."""
    probed = sum(trial.config == config and not trial.in_play_off for trial in seen.trials)
    return config in seen.elsewhere or (num_known is not None and probed > num_known)
