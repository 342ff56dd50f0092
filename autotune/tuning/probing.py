"""Runs proposals: begins a trial, probes the config, and passes the outcome to the study, the history and the listener."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autotune.proposers.cost_model import CostModel
from autotune.records.outcome import Kind, Outcome, calmer
from autotune.records.prediction import Prediction
from autotune.records.settings import ProbeSettings
from autotune.records.trial import PLAY_OFF, Proposal, Trial
from autotune.runners.runner import ProbeFault, ProbeJob, Runner
from autotune.study.history import History
from autotune.study.store import Store
from autotune.tuning.budget import Budget
from autotune.tuning.events import Listener, Note, ProbeEnded, ProbeStarted

MAX_FAULTS = 3  # failures of the machinery itself before the search gives up


@dataclass(kw_only=True)
class Flight:
    """A probe that runs.

    Attributes:
        number: the number of its trial.
        disturbed: the outcome of its first run, if that was disturbed and this is the second.
    """

    number: int
    proposal: Proposal
    prediction: Prediction | None
    settings: ProbeSettings
    disturbed: Outcome | None = None


class Probing:
    """Probes configs, as many at a time as the runner has slots.

    Args:
        settings: for every probe; the budget adds time-outs and the slowest speed worth timing.
        interrupted: whether the user wants the search to end.
    """

    def __init__(
        self,
        runner: Runner,
        store: Store,
        history: History,
        cost_model: CostModel,
        budget: Budget,
        settings: ProbeSettings,
        listener: Listener,
        interrupted: Callable[[], bool],
    ) -> None:
        self.runner = runner
        self.store = store
        self.history = history
        self.cost_model = cost_model
        self.budget = budget
        self.settings = settings
        self.listener = listener
        self.interrupted = interrupted
        self.num_faults = 0
        self._in_flight: dict[int, Flight] = {}  # by the runner's ticket

    @property
    def has_free_slot(self) -> bool:
        """Whether another probe may be started now."""
        return len(self._in_flight) < self.runner.num_slots

    @property
    def is_running(self) -> bool:
        """Whether any probe runs."""
        return bool(self._in_flight)

    def probe(self, proposal: Proposal, settings: ProbeSettings | None = None) -> Trial | None:
        """Run one proposal to its end. None if the machinery failed, or time was up before there was a finding."""
        found = None
        with self.nothing_left_running():
            self.start(proposal, settings)
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
            raise

    def start(self, proposal: Proposal, settings: ProbeSettings | None = None) -> None:
        """Begin a trial for a proposal and submit it.

        Args:
            settings: the play-off's; by default the search's, paced by the budget.
        """
        settings = settings or self.budget.paced(self.settings, self.history)
        in_play_off = proposal.stage == PLAY_OFF
        prediction = None if in_play_off else self.cost_model.predict(self.history, proposal.config)
        number = self.store.begin(proposal, prediction, self.history.space)
        if self.budget.first_probe_s is None:
            self.budget.first_probe_s = self.budget.elapsed_s
        self.listener.on(
            ProbeStarted(
                number=number,
                stage=proposal.stage,
                config=proposal.config,
                reason=proposal.reason or (prediction.reason if prediction else ""),
                prediction=prediction,
                elapsed_s=self.budget.elapsed_s,
            )
        )
        self._submit(Flight(number=number, proposal=proposal, prediction=prediction, settings=settings))

    def _submit(self, flight: Flight) -> None:
        left_s = max(1.0, self.budget.left_s)
        settings = flight.settings.replace(timeout_s=min(flight.settings.timeout_s, left_s))
        self.history.running.add(flight.proposal.config)
        try:
            ticket = self.runner.submit(ProbeJob(config=flight.proposal.config, settings=settings))
        except ProbeFault as fault:
            self._fault([flight], fault)
        except BaseException as error:
            self._give_up(flight, _cause(error))
            raise
        else:
            self._in_flight[ticket] = flight

    def finish_next(self) -> Trial | None:
        """Wait for the next probe to end.

        Returns:
            Its trial; None if the machinery failed, if the probe was disturbed and runs again, or if the end of the search
            cut it short.
        """
        try:
            finished = self.runner.collect()
        except ProbeFault as fault:
            lost = self._in_flight if fault.tickets is None else self._in_flight.keys() & set(fault.tickets)
            self._fault([self._in_flight.pop(ticket) for ticket in tuple(lost)], fault)
            return None
        assert finished is not None and isinstance(finished.result, Outcome)
        flight = self._in_flight.pop(finished.ticket)
        outcome = finished.result
        self.budget.add_run(outcome, self.runner.num_slots)
        if flight.disturbed is not None:
            outcome = calmer(flight.disturbed, outcome)
        elif self._is_worth_another(outcome):
            flight.disturbed = outcome
            self._submit(flight)
            return None
        return self._end(flight, outcome)

    def _is_worth_another(self, outcome: Outcome) -> bool:
        disturbed = outcome.measurement is not None and bool(outcome.measurement.disturbances)
        return disturbed and not self.interrupted() and self.budget.elapsed_s + outcome.wall_s < self.budget.budget_s

    def _end(self, flight: Flight, outcome: Outcome) -> Trial | None:
        proposal = flight.proposal
        in_play_off = proposal.stage == PLAY_OFF
        self.history.running.discard(proposal.config)
        if in_play_off and outcome.kind is Kind.TIMEOUT and self.budget.left_s <= 0:
            # killed for want of time, not of patience: that tells nothing of the config
            self.store.fail(flight.number, "cut short by the end of the search")
            return None
        objective = self.history.objective.in_play_off() if in_play_off else self.history.objective
        trial = self.store.finish(
            flight.number,
            outcome,
            objective,
            worst=self.history.worst_score,
            disturbed=flight.disturbed is not None,
        )
        self.history.append(trial)
        self.listener.on(
            ProbeEnded(
                number=trial.number,
                stage=trial.stage,
                config=trial.config,
                outcome=outcome,
                prediction=flight.prediction,
                feasible=trial.feasible,
                best=self.history.best,
                baseline=self.history.baseline,
                elapsed_s=self.budget.elapsed_s,
            )
        )
        return trial

    def _fault(self, lost: list[Flight], fault: ProbeFault) -> None:
        """Note that the machinery failed; the search gives up after a few of these."""
        for flight in lost:
            self._give_up(flight, str(fault))
        self.num_faults += 1
        self.listener.on(Note(text=str(fault), warning=True))
        if self.num_faults >= MAX_FAULTS:
            raise fault

    def _give_up(self, flight: Flight, why: str) -> None:
        self.history.running.discard(flight.proposal.config)
        self.store.fail(flight.number, why)


def _cause(error: BaseException) -> str:
    return "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
