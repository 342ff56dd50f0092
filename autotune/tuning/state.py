"""The state that the steps of a search share, and how it probes a config.

A trial begins, the config is probed, and the outcome goes to the study, the history and the listener.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autotune.proposers import sampler_named
from autotune.proposers.base import Proposer
from autotune.proposers.cost_model import CostModel
from autotune.proposers.one_at_a_time import UndoChanges, Untried
from autotune.records.config import Choice, ProbeSettings
from autotune.records.device import NOT_MEASURED, Calibration
from autotune.records.inspection import Inspection
from autotune.records.options import SearchOptions
from autotune.records.outcome import Bound, Kind, Outcome, calmer
from autotune.records.result import Cost, Result
from autotune.records.study import BASELINE, PLAY_OFF, Neighbours, Prediction, Proposal, Trial
from autotune.runners.jobs import ProbeJob
from autotune.runners.runner import NoSlotLeft, ProbeFault, Runner, SlotLost
from autotune.study.figures import unrest
from autotune.study.history import History
from autotune.study.priors import PriorStore
from autotune.study.store import Store
from autotune.tuning.anytime import answer_so_far
from autotune.tuning.at_once import AtOnce
from autotune.tuning.budget import COMPILING_PATIENCE, Budget, Patience, patience_for
from autotune.tuning.communicators import keep_communicators
from autotune.tuning.events import Listener, ProbeAdvanced, ProbeEnded, ProbeStarted
from autotune.tuning.playoff import PlayOff
from autotune.tuning.trace_ahead import Tracing

GOES_ON = "the study keeps what was measured, and the same command goes on with it"
MAX_FAULTS = 3  # failures of the machinery itself before the search gives up
LOOK_EVERY_S = 0.25  # at the probes that run
CLEARLY = 2.0  # standard deviations of what a disturbance may have cost


@dataclass(kw_only=True)
class Flight:
    """A probe that runs.

    Attributes:
        number: the number of its trial.
        patience: how long it may take.
        prediction: of its config, before it ran.
        alone: whether nothing else may run beside it.
        slot: the slot that it runs in, or should run in; empty for any.
        began_s: when it was submitted, on the runner's clock; None before.
        disturbed: the outcome of its first run, if that was disturbed and this is the second.
        hopeless: why it was ended, and what is known of its config; None where it was not.
        moved: whether it has lost a slot already, and runs in its second one.
    """

    number: int
    proposal: Proposal
    settings: ProbeSettings
    patience: Patience
    prediction: Prediction | None = None
    alone: bool = False
    slot: str = ""
    began_s: float | None = None
    disturbed: Outcome | None = None
    hopeless: tuple[str, Bound | None] | None = None
    moved: bool = False


@dataclass(kw_only=True)
class Search:
    """One search over one task: its parts, and probes, as many at a time as the runner has slots.

    Attributes:
        settings: for every probe; the budget adds time-outs and the slowest speed worth timing.
        interrupted: whether the user wants the search to end.
        calibration: of the device.
        asked: the options that must be given again to run the answer.
        warnings: the warnings of the answer.
        play_off: None before it was opened.
        refused: what did not pass its comparison with plain fp32, each with the reason.
        answer_before: the study's answer when this search began, before its inspection; None where it had none.
        answered: the answer of another search of the study, which held the play-off; None where this one did.
        others: what else of the task is to be trained, each to be ranked by a search of its own.
        beside_one_device: whether one device is measured beside those that train together.
        priors: what earlier studies left, and this one will; None where nothing is remembered.
        at_once: how many probes run at once, and which alone.
    """

    runner: Runner
    store: Store
    history: History
    inspection: Inspection
    cost_model: CostModel
    budget: Budget
    settings: ProbeSettings
    listener: Listener
    interrupted: Callable[[], bool]
    options: SearchOptions
    tracing: Tracing
    calibration: Calibration = NOT_MEASURED
    asked: Mapping[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    play_off: PlayOff | None = None
    refused: list[str] = field(default_factory=list)
    answer_before: Result | None = None
    answered: Result | None = None
    others: Sequence[Mapping[str, Choice]] = ()
    beside_one_device: bool = False
    num_faults: int = 0
    priors: PriorStore | None = None
    at_once: AtOnce = field(init=False)
    _in_flight: dict[int, Flight] = field(default_factory=dict)  # by the runner's ticket
    _waiting: deque[Flight] = field(default_factory=deque)  # begun, for which there is no slot yet
    _num_notes: int = 0  # of the runner, which were told
    _usual: set[str] = field(default_factory=set)  # disturbances that a second run met again: this machine is like that

    def __post_init__(self) -> None:
        self.at_once = AtOnce([slot.name for slot in self.runner.slots()], self.store.facts.neighbours)
        self.history.neighbours = self.at_once.found
        self._num_notes = len(self.runner.notes)

    def proposer(self) -> Proposer:
        """A new proposer for the sampler that the user chose."""
        return sampler_named(self.options.sampler)(self.cost_model, self.options.seed)

    def undo_changes(self) -> Proposer:
        """A proposer of the best config with changes undone."""
        return UndoChanges(self.cost_model.is_likely_to_fit, self.cost_model.predict)

    def untried(self) -> Untried:
        """A proposer of what no probe has run yet."""
        return Untried(self.cost_model)

    def cost(self) -> Cost:
        """What the search has cost so far. Trials of other searches of the study count, their time does not."""
        trials, wall_s, spent_s = self.history.trials, self.budget.elapsed_s, self.budget.spent_s
        return Cost(
            probes=len(trials),
            outcomes=dict(Counter(str(trial.outcome.kind) for trial in trials)),
            train_s=sum(trial.outcome.spent_training_s for trial in trials),
            wall_s=wall_s,
            first_probe_s=self.budget.first_probe_s,
            split_s={**spent_s, "other": wall_s - sum(spent_s.values())},
        )

    def warn(self, text: str) -> None:
        """Warn the user now and in the answer. A repeated warning is given once."""
        if text not in self.warnings:
            self.warnings.append(text)
            self.listener.warn(text)

    @property
    def has_free_slot(self) -> bool:
        """Whether another probe may be started now."""
        if self._waiting or any(flight.alone for flight in self._in_flight.values()):
            return False
        return len(self._in_flight) < self.at_once.width

    @property
    def is_running(self) -> bool:
        """Whether any probe runs, or waits for its slot."""
        return bool(self._in_flight or self._waiting)

    def probe(self, proposal: Proposal, settings: ProbeSettings | None = None, slot: str = "") -> Trial | None:
        """Run one proposal to its end, as `start` begins it. None if the machinery failed, or time was up before there was a finding."""
        found = None
        with self.nothing_left_running():
            self.start(proposal, settings, slot, alone=True)  # where it is not begun, nothing runs
            while self.is_running:
                found = self.finish_next()
        return found

    @contextlib.contextmanager
    def nothing_left_running(self) -> Iterator[None]:
        """Cancel the probes in flight, and close their trials, if the block raises."""
        try:
            yield
        except BaseException as error:
            for ticket, flight in self._in_flight.items():
                self.runner.cancel(ticket)
                self._give_up(flight, _cause(error))
            self._in_flight.clear()
            self._give_up_waiting(_cause(error))
            raise

    def start(
        self, proposal: Proposal, settings: ProbeSettings | None = None, slot: str = "", *, alone: bool = False
    ) -> bool:
        """Begin a trial for a proposal, and submit it as soon as there is a slot.

        Returns:
            Whether it was begun: another search of the study may run the config by now, or have probed it.

        Args:
            settings: the play-off's; by default the search's, paced by the budget.
            slot: of the runner, to run it in if that is free; empty for any.
            alone: whether nothing else may run beside it. So it is anyway with what compiles, or keeps the host busy.
        """
        in_play_off = proposal.stage == PLAY_OFF
        patience = patience_for(proposal, self.history, self.budget, self.inspection, self.runner.slowest_start)
        if settings is None:
            front = () if proposal.stage == BASELINE else patience.front
            settings = self.budget.paced(self.settings, self.history).replace(front=front)
        setup_s = COMPILING_PATIENCE * self.history.setup_s(proposal.config)
        settings = settings.replace(
            timeout_s=settings.timeout_s + setup_s,
            num_shapes=self.history.num_shapes(proposal.config),
            shape_growth=self.history.shape_growth(proposal.config),
        )
        prediction = None if in_play_off else self.cost_model.predict(self.history, proposal.config)
        num_known = sum(trial.config == proposal.config for trial in self.history.searched)
        number = self.store.begin(proposal, prediction, self.history.space, num_known=num_known)
        if number is None:
            self.catch_up()
            return False
        if self.budget.first_probe_s is None:
            self.budget.first_probe_s = self.budget.elapsed_s
        alone = alone or self.at_once.runs_alone(proposal.config, self.history.space, self.inspection.device.name)
        self.history.running.add(proposal.config)
        self._waiting.append(
            Flight(
                number=number,
                proposal=proposal,
                settings=settings,
                patience=patience,
                prediction=prediction,
                alone=alone,
                slot=slot,
            )
        )
        self._submit_waiting()
        return True

    def catch_up(self) -> None:
        """Take in what other searches of the study have found, and tell it as if it were this one's."""
        if not self.store.is_shared:
            return
        seen = self.store.look()
        for trial in self.history.catch_up(seen.trials, seen.elsewhere):
            self._tell_ended(trial)

    def _tell_ended(self, trial: Trial) -> None:
        best, chance = answer_so_far(self.history, self.cost_model, self.play_off)
        ended = ProbeEnded(
            trial=trial,
            best=best,
            baseline=self.history.baseline,
            elapsed_s=self.budget.elapsed_s,
            chance=chance,
        )
        self.listener.on(ended)

    @property
    def left_s(self) -> float:
        """Seconds until a running probe is cut short."""
        return self.budget.left_s(has_answer=self.history.best is not None)

    def _submit_waiting(self) -> None:
        """Submit the probes that wait, in their order, as long as there is a slot for the next one."""
        while self._waiting and (slot := self._slot_for(self._waiting[0])):
            self._submit(self._waiting.popleft(), slot)

    def _slot_for(self, flight: Flight) -> str:
        """The slot to run a probe in now; empty where there is none for it."""
        running = [*self._in_flight.values()]
        if running and (flight.alone or any(other.alone for other in running)):
            return ""
        taken = {other.slot for other in running}
        free = [name for name in self.at_once.slots if name not in taken]
        if len(running) >= self.at_once.width:
            return ""
        return flight.slot if flight.slot in free else free[0]

    def _submit(self, flight: Flight, slot: str) -> None:
        left_s = max(1.0, self.left_s)
        settings = flight.settings.replace(timeout_s=min(flight.settings.timeout_s, left_s))
        proposal, is_first = flight.proposal, flight.began_s is None
        flight.began_s, flight.slot = self.runner.now_s(), slot
        if is_first:
            prediction = flight.prediction
            self.listener.on(
                ProbeStarted(
                    number=flight.number,
                    stage=proposal.stage,
                    config=proposal.config,
                    reason=proposal.reason or (prediction.reason if prediction else ""),
                    prediction=prediction,
                    elapsed_s=self.budget.elapsed_s,
                    slot=slot if len(self.at_once.slots) > 1 else "",
                )
            )
        try:
            ticket = self.runner.submit(ProbeJob(config=proposal.config, settings=settings), slot)
        except SlotLost as lost:
            self._go_on_without(lost, [flight])
        except NoSlotLeft as fault:
            self._end_early([flight], fault)
        except ProbeFault as fault:
            self._fault([flight], fault)
        except BaseException as error:
            self._give_up(flight, _cause(error))
            raise
        else:
            self._in_flight[ticket] = flight

    def _go_on_without(self, lost: SlotLost, flights: Sequence[Flight]) -> None:
        """Take a slot out; what it ran waits for another one, before all others. It does so once."""
        self.at_once.lose(lost.slot)
        self.warn(str(lost))
        for flight in flights:
            if flight.moved:  # it may be what they died of
                self._end(flight, Outcome(kind=Kind.CRASHED, cause=f"two slots were lost while it ran: {lost}"))
                continue
            flight.slot, flight.hopeless, flight.moved = "", None, True
            self._waiting.appendleft(flight)
        left_out = (*self.at_once.found.left_out, str(lost))
        self._keep_neighbours(replace(self.at_once.found, left_out=left_out))
        self._use_new_slots()

    def _use_new_slots(self) -> bool:
        """Use the slots that have come meanwhile. Returns whether there are any."""
        gained = self.runner.new_slots()
        for note in self.runner.notes[self._num_notes :]:
            self.warn(note)
        self._num_notes = len(self.runner.notes)
        for slot in gained:
            self.listener.tell(f"the slot {slot} has come, and is used from now on")
            self.at_once.gain(slot)
        if gained:
            self._keep_neighbours(self.at_once.found)
        return bool(gained)

    def _end_early(self, flights: Sequence[Flight], fault: NoSlotLeft) -> None:
        """End the search with what is known, since nothing can be run any more.

        Raises:
            NoSlotLeft: nothing is known.
        """
        for flight in flights:
            self._give_up(flight, str(fault))
        self._give_up_waiting(str(fault))
        if self.history.best is None:
            raise fault
        self.warn(f"{fault}; the search ended early, and {GOES_ON}")
        self.budget.end()

    def _keep_neighbours(self, found: Neighbours) -> None:
        self.at_once.found = self.history.neighbours = found
        self.store.keep(neighbours=found)

    def finish_next(self) -> Trial | None:
        """Wait for the next probe to end.

        Returns:
            Its trial; None if the machinery failed, if the probe was disturbed or lost its slot and runs again, if the end of
            the search cut it short, or if a slot has come in which another may be started.
        """
        found = self._finish_next()
        self._use_new_slots()
        if self.interrupted():
            self._give_up_waiting("interrupted")
        self._submit_waiting()
        return found

    def _finish_next(self) -> Trial | None:
        if not self._in_flight:
            return None
        try:
            while (finished := self.runner.collect(LOOK_EVERY_S)) is None:
                self._look_after_running()
                if self._use_new_slots():
                    return None
        except SlotLost as lost:
            self._go_on_without(lost, [self._in_flight.pop(ticket) for ticket in lost.tickets or ()])
            return None
        except NoSlotLeft as fault:
            self._end_early([self._in_flight.pop(ticket) for ticket in fault.tickets or ()], fault)
            return None
        except ProbeFault as fault:
            gone = self._in_flight if fault.tickets is None else self._in_flight.keys() & set(fault.tickets)
            self._fault([self._in_flight.pop(ticket) for ticket in tuple(gone)], fault)
            return None
        flight, outcome = self._in_flight.pop(finished.ticket), finished.result
        if outcome.device_fault:  # the device cannot be used any more: that tells nothing of the config
            self._fault([flight], ProbeFault(f"{outcome.cause}; {GOES_ON}"))
            return None
        if flight.hopeless is not None and outcome.kind is Kind.TIMEOUT:
            cause = "; ".join(filter(None, (flight.hopeless[0], outcome.waited_for)))
            outcome = replace(outcome, cause=cause, bound=flight.hopeless[1])
        self.budget.add_run(outcome, 1 if flight.alone else self.at_once.width)
        if flight.disturbed is not None:
            self._usual |= _kinds(flight.disturbed) & _kinds(outcome)
            outcome = self._better_of(flight.disturbed, outcome)
        elif self._is_worth_another(flight, outcome):
            flight.disturbed, flight.hopeless = outcome, None
            flight.alone = flight.alone or outcome.crowded
            self._waiting.appendleft(flight)
            return None
        return self._end(flight, outcome)

    def _look_after_running(self) -> None:
        """Tell how far the probes have come, and end those that nothing can come of any more."""
        self.store.beat()
        for ticket, flight in self._in_flight.items():
            if (progress := self.runner.progress(ticket)) is None:
                continue
            self.listener.on(ProbeAdvanced(number=flight.number, progress=progress))
            assert flight.began_s is not None
            elapsed_s = self.runner.now_s() - flight.began_s
            if flight.hopeless is None and elapsed_s > flight.patience.allowed_s(progress):
                patience = flight.patience
                flight.hopeless = patience.why(progress, elapsed_s), patience.bound(progress, elapsed_s)
                self.runner.cancel(ticket)

    def _is_worth_another(self, flight: Flight, outcome: Outcome) -> bool:
        """Whether to run a disturbed probe again. In the play-off only a crowded one is: more rounds make up for other trouble. Outside
        it one that would not be the best undisturbed is not, unless it is the baseline's, which all others are compared with.
        """
        stage, objective, best = flight.proposal.stage, self.history.objective, self.history.best
        trouble = _kinds(outcome) - self._usual or not objective.is_known(outcome)
        if trouble and stage != BASELINE and best is not None and outcome.measurement and objective.is_known(outcome):
            trouble = objective.merit(outcome) * math.exp(CLEARLY * unrest(outcome)) > objective.merit(best[1])
        disturbed = outcome.crowded or (stage != PLAY_OFF and trouble)
        return (
            bool(disturbed) and not self.interrupted() and self.budget.elapsed_s + outcome.wall_s < self.budget.budget_s
        )

    def _better_of(self, first: Outcome, second: Outcome) -> Outcome:
        """Of two probes of one config the one that tells the objective's figure, or else the less disturbed one."""
        known = [outcome for outcome in (first, second) if outcome.ok and self.history.objective.is_known(outcome)]
        return known[0] if len(known) == 1 else calmer(first, second)

    def _end(self, flight: Flight, outcome: Outcome) -> Trial | None:
        proposal = flight.proposal
        in_play_off = proposal.stage == PLAY_OFF
        self.history.running.discard(proposal.config)
        if outcome.kind is Kind.CRASHED and self.interrupted():  # a batch system signals every process of a job
            self.store.fail(flight.number, f"interrupted: {outcome.cause}")
            return None
        if outcome.kind is Kind.TIMEOUT and self.left_s <= 0 and (in_play_off or self.history.best is not None):
            # killed for want of time, not of patience: that tells nothing of the config
            self.store.fail(flight.number, "cut short by the end of the search")
            return None
        if (found := outcome.measurement) is not None:  # an earlier config may have filled the cache
            cold_s = max(found.compile_cold_s, self.history.compile_cold_s(proposal.config))
            outcome = replace(outcome, measurement=replace(found, compile_cold_s=cold_s))
        objective = self.history.objective.in_play_off() if in_play_off else self.history.objective
        trial = self.store.finish(flight.number, outcome, objective, disturbed=flight.disturbed is not None)
        self.history.append(trial)
        keep_communicators(self.runner, self.inspection, self.store.place.folder, outcome)
        if proposal.stage == BASELINE and len(self.at_once.slots) > 1:
            if told := self.at_once.note_baseline(proposal.config, outcome):
                self.warn(told)
            self._keep_neighbours(self.at_once.found)
        self._tell_ended(trial)
        return trial

    def _fault(self, lost: list[Flight], fault: ProbeFault) -> None:
        """Note that the machinery failed; the search gives up after a few of these."""
        for flight in lost:
            self._give_up(flight, str(fault))
        self.num_faults += 1
        self.listener.warn(str(fault))
        if self.num_faults >= MAX_FAULTS:
            raise fault

    def _give_up_waiting(self, why: str) -> None:
        while self._waiting:
            self._give_up(self._waiting.popleft(), why)

    def _give_up(self, flight: Flight, why: str) -> None:
        self.history.running.discard(flight.proposal.config)
        self.store.fail(flight.number, why)


def _kinds(outcome: Outcome) -> frozenset[str]:
    """The disturbances of a process by their words alone: how much of the time each took differs from process to process."""
    return frozenset(re.sub(r"[\d.,]+", "", text) for text in outcome.disturbances)


def _cause(error: BaseException) -> str:
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
