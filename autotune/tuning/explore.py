"""Exploring: probes the baseline, then a proposer's configs, until it has no more or time is up."""

from __future__ import annotations

from autotune.errors import without_digits
from autotune.proposers.base import Proposer
from autotune.records.config import BATCH_SIZE, Config
from autotune.records.outcome import Kind
from autotune.records.study import BASELINE, Proposal, Traced, Trial
from autotune.study.history import History
from autotune.tuning import why
from autotune.tuning.confirm import NEAR_BEST, near_the_best
from autotune.tuning.playoff import CLOSE
from autotune.tuning.state import Search
from autotune.tuning.together import wait_for, wait_for_others
from autotune.tuning.trace_ahead import SLICE_S
from autotune.units import format_seconds, plural

UNDONE = 2  # probes for which time is kept, to undo the changes that are predicted to matter most
SAME_ERRORS = 3  # so many unlike configs that fail alike, when nothing has run, end the search


def measure_baseline(search: Search) -> None:
    """Probe the baseline. If the user did not give one, halve its batch until it fits and neither hangs nor crashes, while there are
    trials left.
    """
    given, history = search.inspection.baseline_given, search.history
    while not search.interrupted():
        smaller = None if search.inspection.keeps_baseline_batch else history.space.with_smaller_baseline()
        # plain training of so many samples ran out of memory in the inspection
        too_large = (
            bool(search.inspection.shortage) and history.space.baseline.batch_size >= search.inspection.step_samples
        )
        if smaller is None or not too_large:
            _probe_baseline(search, "what you run today" if given or search.runner.stated.baseline else "plain fp32")
            outcome = history.baseline
            if smaller is None or outcome is None:
                return
            if not history.objective.does_not_fit(outcome) and outcome.kind not in (Kind.TIMEOUT, Kind.CRASHED):
                return
            if not search.budget.has_trials_left(history):
                return
            _trace_between(search)
        history.space = smaller
        while (
            not why.may_fit(history, search.cost_model, smaller.baseline)
            and (half := smaller.with_smaller_baseline()) is not None
        ):
            history.space = smaller = half
        search.store.keep(baseline_config=smaller.baseline.as_dict())


def measure_baseline_again(search: Search) -> bool:
    """Probe the baseline once more where nothing came near its one probe. True if that was done."""
    history, baseline = search.history, search.history.space.baseline
    probed = [trial for trial in history.searched if trial.config == baseline and trial.outcome.ok]
    others = [outcome for config, outcome in history.known.items() if config != baseline]
    slower = [o for o in others if history.objective.feasible(o) or o.kind is Kind.TIMEOUT]
    is_far_ahead = near_the_best(history.feasible, history.objective) == [baseline]
    if not (
        is_far_ahead
        and slower
        and history.objective.rests_on_speed
        and len(probed) == 1
        and search.budget.allows_a_probe(history)
    ):
        return False
    reason = "again, because no config came close: the machine may have become slower"
    return search.probe(Proposal(config=baseline, stage=BASELINE, reason=reason)) is not None


def tell_of_large_batches(search: Search) -> None:
    """Say which batches wait for a faster config because a probe of them would take too much of the budget."""
    history = search.history
    sizes = history.space.choices[BATCH_SIZE]
    probed = [size for size in sizes if int(size) <= history.largest_batch_size]
    if len(probed) < len(sizes):
        search.listener.tell(
            f"batches above {probed[-1]} are tried only if a faster config is found: at the speed so far, a step of one takes "
            f"more than {format_seconds(history.longest_step_s)}; a larger --budget includes them"
        )


def _probe_baseline(search: Search, reason: str) -> None:
    """Probe the baseline, again after each fault of the machinery: its time bounds that of the other probes."""
    history, faults = search.history, -1
    while search.num_faults != faults:
        faults = search.num_faults
        wait_for(search, history.space.baseline)
        if search.interrupted() or not history.admissible()(history.space.baseline):
            return
        with search.nothing_left_running():
            if not search.start(Proposal(config=history.space.baseline, stage=BASELINE, reason=reason), alone=True):
                faults = -1  # another search was faster
            _trace_beside(search)
            while search.is_running:
                search.finish_next()


def explore(search: Search, proposer: Proposer, *, while_worth: bool = False) -> None:
    """Probe the proposer's configs, as many at once as may, and the baseline beside them until it is known what that costs.

    Args:
        while_worth: end where a probe is not expected to gain as much as it takes (`Budget.is_worth`).
    """
    history = search.history
    with search.nothing_left_running():
        while True:
            _trace_between(search)
            _trace_beside(search)
            search.catch_up()
            while _may_start_another(search) and not why.is_hopeless(history, search.cost_model):
                if (proposal := proposer.propose(history)) is None or (while_worth and not _pays(search, proposal)):
                    break
                _compare_baseline(search)  # only where another probe is to come, which runs beside it
                search.start(proposal)
            if not search.is_running:
                if not wait_for_others(search):
                    return
                continue
            _end_if_everything_fails_alike(history, search.finish_next())


def _pays(search: Search, proposal: Proposal) -> bool:
    """Whether a proposal is expected to gain more than its probe, and its place in a round of the play-off, take."""
    history = search.history
    gain = search.cost_model.expected_gain(history, proposal.config)
    cost_s = 2 * search.budget.expected_probe_s(history) + history.setup_s(proposal.config)
    return gain is None or search.budget.is_worth(gain, cost_s, history)


def _compare_baseline(search: Search) -> None:
    """Start the baseline once more, alone or beside other probes, where that is needed to know what these cost it."""
    baseline, known = search.history.space.baseline, search.history.baseline
    if known is None or not known.ok or baseline in search.history.in_flight or not (how := search.at_once.wants()):
        return
    reason = (
        "alone once more: processes differ, too" if how == "alone" else "beside other probes: does that slow it down?"
    )
    search.start(
        Proposal(config=baseline, stage=BASELINE, reason=reason), slot=search.at_once.slots[0], alone=how == "alone"
    )


def undo_changes(search: Search) -> None:
    """Probe the best config without the changes that gain little, then with one of its changes undone at a time.

    The time that was kept for these probes is released. A simpler config that comes near the best takes part in the play-off.
    """
    search.budget.kept_probes = 0
    explore(search, search.undo_changes())
    search.budget.kept_probes = UNDONE


def is_close_to_the_best(history: History, config: Config) -> bool:
    """Whether a config is feasible and within `CLOSE` of the best: the play-off takes the simpler of two such."""
    found, objective = history.feasible.get(config), history.objective
    if found is None or history.best is None:
        return False
    return objective.merit(history.best[1]) <= (1 + CLOSE) * objective.merit(found)


def explore_untried(search: Search) -> None:
    """Probe what was not tried yet, however little is expected of it, until something comes near the baseline, which leads a play-off.

    No time is kept for a play-off meanwhile: of what has played nothing is expected to be clearly better.
    """
    with search.budget.without_rounds():
        explore(search, _UntilOneIsNear(search.untried(), search.history))


class _UntilOneIsNear:
    """Proposes what another does, until a config that was not known before comes near the baseline."""

    def __init__(self, others: Proposer, history: History) -> None:
        self._others, self._known = others, {*history.feasible}

    def propose(self, history: History) -> Proposal | None:
        """The other's proposal; None once one came near the baseline."""
        merits = {config: history.objective.merit(outcome) for config, outcome in history.feasible.items()}
        near = NEAR_BEST * merits.get(history.space.baseline, 0.0)
        if any(merit >= near and config not in self._known for config, merit in merits.items()):
            return None
        return self._others.propose(history)


def _may_start_another(search: Search) -> bool:
    """Whether to start another probe. As long as tracing would disturb their timing, one runs at a time."""
    tracing = search.tracing
    waits_for_tracing = search.is_running and not tracing.is_done and tracing.beside is None
    may_go_on = not search.interrupted() and search.budget.allows_a_probe(search.history)
    return may_go_on and search.has_free_slot and not waits_for_tracing


def _trace_between(search: Search) -> None:
    """Trace more configs, if no probe runs and another one is to come."""
    tracing = search.tracing
    if tracing.beside is None and not tracing.is_done and not search.is_running and _may_start_another(search):
        with search.budget.split("tracing"):
            if search.at_once.width > 1:  # several probes at once would wait for each slice
                while not tracing.is_done and not search.interrupted():
                    tracing.advance()
            elif search.history.baseline and not {*search.history.feasible} - {search.history.space.baseline}:
                _trace_the_next(search)
            else:
                tracing.advance()
        _note_traces(search)


def _trace_the_next(search: Search) -> None:
    """Trace the baseline, and what the config needs that comes next, unless that fits easily: the first answer beside the baseline is not
    to wait until all others are traced.

    Which config comes next depends on what is known of its memory, so it is asked for again after each trace. Where the baseline does
    not fit, only what was traced is trusted to fit; the fastest config is traced then, or a slow one would come next.
    """
    history, tracing = search.history, search.tracing
    baseline, ends_s = history.space.baseline, tracing.wall_s + SLICE_S
    comes_next = None if history.objective.feasible(history.known[baseline]) else search.cost_model.hoped_for(history)

    def needed() -> list[Config]:
        fits = comes_next is not None and search.cost_model.fits_easily(history, comes_next)
        return [baseline] if comes_next is None or fits else [baseline, comes_next]

    while not tracing.is_done and tracing.wall_s < ends_s and not search.interrupted():
        if comes_next is None or tracing.are_traced(needed()):
            proposal = search.proposer().propose(history)  # by a new one: some remember what they have proposed
            comes_next = proposal.config if proposal else baseline
        if tracing.are_traced(needed()):
            return
        tracing.advance(only=needed())


def _trace_beside(search: Search) -> None:
    """Take in what was traced beside the probes, and go on with it, where that does not disturb them."""
    tracing = search.tracing
    if tracing.beside is not None and not tracing.is_done:
        tracing.advance_beside()
        _note_traces(search)


def _note_traces(search: Search) -> None:
    """Keep how far tracing has come, and tell it at the end."""
    tracing, traces = search.tracing, search.tracing.traces
    traced = Traced(num_groups=len(traces.models), failures=dict(traces.failures), wall_s=tracing.wall_s)
    search.store.keep(traces=traced)
    if not tracing.is_done:
        return
    if traces.models:
        took = f" in {tracing.wall_s:.1f} s" if tracing.beside is None else ", beside the probes"
        search.listener.tell(f"predicted the memory of {plural(len(traces.models), 'combination')} of techniques{took}")
    if missing := len(tracing.missing):
        time_is_up = f"the time for tracing was up ({tracing.max_s:.1f} s)"
        ended = f"tracing failed ({tracing.fault})" if tracing.fault else time_is_up
        search.listener.tell(
            f"{ended} with {plural(missing, 'combination')} of techniques to go: probes tell their memory, and the next search of "
            "this task carries on"
        )
    if traces.failures:
        label, reason = next(iter(traces.failures.items()))
        others = f" (and {len(traces.failures) - 1} more)" if len(traces.failures) > 1 else ""
        what = f" for {label}{others}" if traces.models else ""
        search.listener.tell(f"memory cannot be traced{what}: {reason}; it is learned from probes")


def _end_if_everything_fails_alike(history: History, ended: Trial | None) -> None:
    """End the search if nothing has run, and several configs that differ in more than the batch failed with the same error, or with a
    loss that is not finite.

    Raises:
        TaskError: the error, where it arose in the user's code.
        OwnFault: the error, where it arose in autotune itself.
    """
    known = history.known
    if ended is None or any(outcome.ok for outcome in known.values()):
        return
    kind, cause = ended.outcome.kind, without_digits(ended.outcome.cause)
    if kind not in (Kind.ERROR, Kind.NONFINITE):
        return
    unlike = {
        config.replace(batch_size=1, accumulation_steps=1)
        for config, outcome in known.items()
        if outcome.kind is kind and without_digits(outcome.cause) == cause
    }
    if len(unlike) >= SAME_ERRORS:
        raise why.as_error(ended.outcome, f"{len(unlike)} different configs failed with this error, and none ran")
