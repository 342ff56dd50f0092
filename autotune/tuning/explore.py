"""Exploring: probes the baseline, then a proposer's configs, until it has no more or time is up."""

from __future__ import annotations

from autotune.proposers.base import Proposer
from autotune.records.outcome import Kind
from autotune.records.trial import BASELINE, Proposal, Trial
from autotune.study.history import History
from autotune.tuning import why
from autotune.tuning.state import Search
from autotune.units import plural

SAME_ERRORS = 3  # of unlike configs, when nothing has run, that end the search
TRACE_SLICE_S = 5.0  # between two probes


def measure_baseline(search: Search) -> None:
    """Probe the baseline. If the user did not give one, halve its batch until it fits."""
    given, history = search.inspection.baseline_given, search.history
    while True:
        _probe_baseline(search, "what you run today" if given else "plain fp32")
        outcome = history.baseline
        too_large = outcome is not None and history.objective.does_not_fit(outcome)
        smaller = history.space.with_smaller_baseline()
        if given or not too_large or smaller is None or search.interrupted():
            return
        history.space = smaller
        search.store.set_attribute("baseline_config", smaller.baseline.as_dict())


def _probe_baseline(search: Search, reason: str) -> None:
    """Probe the baseline, again after each fault of the machinery: its time bounds that of the other probes."""
    history, faults = search.history, -1
    while search.probing.num_faults != faults:
        faults = search.probing.num_faults
        if search.interrupted() or not history.admissible()(history.space.baseline):
            return
        search.probe(Proposal(config=history.space.baseline, stage=BASELINE, reason=reason))


def explore(search: Search, proposer: Proposer) -> None:
    """Probe the proposer's configs, as many at a time as the runner has slots."""
    probing, history = search.probing, search.history
    with probing.nothing_left_running():
        while True:
            _trace_meanwhile(search)
            while _may_start_another(search) and (proposal := proposer.propose(history)) is not None:
                probing.start(proposal)
            if not probing.is_running:
                return
            _end_if_everything_fails_alike(history, probing.finish_next())


def _may_start_another(search: Search) -> bool:
    """Whether to start another probe. Until memory is predicted one runs at a time: tracing would disturb its timing."""
    probing = search.probing
    waits_for_tracing = probing.is_running and not search.tracing.is_done
    may_go_on = not search.interrupted() and search.budget.allows_a_probe(search.history)
    return may_go_on and probing.has_free_slot and not waits_for_tracing


def _trace_meanwhile(search: Search) -> None:
    """Trace more configs, if no probe runs and another one is to come."""
    tracing = search.tracing
    if tracing.is_done or search.probing.is_running or not _may_start_another(search):
        return
    with search.budget.split("tracing"):
        tracing.advance(TRACE_SLICE_S)
    traces = tracing.traces
    search.store.set_attribute(
        "traces", {"num_groups": len(traces.models), "failures": dict(traces.failures), "wall_s": tracing.wall_s}
    )
    if not tracing.is_done:
        return
    if traces.models:
        search.tell(f"predicted the memory of {_combinations(len(traces.models))} in {tracing.wall_s:.1f} s")
    if missing := tracing.num_missing:
        search.tell(
            f"there was no time to trace {_combinations(missing)} within {tracing.max_s:.0f} s; "
            "their memory is learned from probes"
        )
    if traces.failures:
        label, reason = next(iter(traces.failures.items()))
        others = f" (and {len(traces.failures) - 1} more)" if len(traces.failures) > 1 else ""
        search.tell(f"memory cannot be traced for {label}{others}: {reason}; it is learned from probes")


def _combinations(number: int) -> str:
    return f"{plural(number, 'combination')} of techniques"


def _end_if_everything_fails_alike(history: History, ended: Trial | None) -> None:
    """End the search if nothing has run, and several configs that differ in more than the batch failed with this error.

    Raises:
        TaskError: the error, where it arose in the user's code.
        OwnFault: the error, where it arose in autotune itself.
    """
    if ended is None or ended.outcome.kind is not Kind.ERROR:
        return
    known = history.known
    if any(outcome.ok for outcome in known.values()):
        return
    cause = why.without_digits(ended.outcome.cause)
    unlike = {
        config.replace(batch_size=1, accumulation_steps=1)
        for config, outcome in known.items()
        if outcome.kind is Kind.ERROR and why.without_digits(outcome.cause) == cause
    }
    if len(unlike) >= SAME_ERRORS:
        raise why.as_error(ended.outcome, f"{len(unlike)} different configs failed with this error, and none ran")
