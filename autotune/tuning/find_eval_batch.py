"""Finds the batch size to evaluate with, once the answer is known: in processes of their own, in time kept for it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, median

from autotune.records.config import BATCH_KEYS, Config
from autotune.records.inspection import Inspection
from autotune.records.measured import Evaluated, Evaluation
from autotune.records.outcome import Kind, Outcome
from autotune.runners.jobs import EvaluateJob
from autotune.runners.runner import ProbeFault
from autotune.study.figures import ratio_interval
from autotune.tuning.state import Search

GAIN = 0.02  # in speed, for which a larger batch is worth its memory
NUM_PROCESSES = 3  # each runs the chosen size; all must succeed
MAX_TIMED_S = 0.5
NO_TIME = "its share of the budget was spent; the same command with a larger --budget goes on"


def evaluation_of(search: Search, answer: Config) -> Evaluation | None:
    """The batch size with which the answer's techniques evaluate fastest; None where nobody has asked for it.

    The study keeps each process, so that no other search of it repeats one.
    """
    key = json.dumps({name: choice for name, choice in answer.as_dict().items() if name not in BATCH_KEYS})
    tried = list(search.store.facts.evaluated.get(key, ()))
    unfinished = ""
    if is_asked_for(search.options.eval, search.inspection) and not search.interrupted():

        def keep(found: Evaluated) -> None:
            tried.append(found)
            search.store.keep(evaluated={**search.store.facts.evaluated, key: tuple(tried)})
            rate = f"{found.samples_per_s:.3g} samples/s" if found.samples_per_s else f"{found.kind}: {found.cause}"
            search.listener.tell(f"evaluation in batches of {found.eval_batch_size}: {rate}")

        with search.budget.split("evaluation"):
            try:
                unfinished = _try_sizes(search, answer, tried, keep)
            except KeyboardInterrupt:  # a second Ctrl-C; what is known by now stays
                unfinished = "interrupted"
    return _found(tried, unfinished) if tried or unfinished else None


def is_asked_for(by_user: bool, inspection: Inspection) -> bool:
    """Whether the user or the task wants the batch size for evaluation."""
    return by_user or bool(inspection.facts.evaluates)


def next_size(tried: Sequence[Evaluated], first: int, most: float) -> int | None:
    """The batch size to try next: up by powers of two while that is faster, then between the best and its neighbours.

    The best is run again at the end. None when enough is known.

    Args:
        first: the batch size to begin at, rounded down to a power of two.
        most: the largest to try.
    """
    bound = min([one.eval_batch_size for one in tried if not one.fits], default=math.inf)
    if (best := _best(tried)) is None:
        size = min(first, most, bound / 2)
        return 2 ** math.floor(math.log2(size)) if size >= 1 else None
    known = [one.eval_batch_size for one in tried]
    near = (2 * best, 4 * best, best // 2, best * 3 // 2, best * 3 // 4) if best.bit_count() == 1 else ()
    for size in near:
        if 1 <= size <= most and size < bound and size not in known:
            return size
    return best if known.count(best) < NUM_PROCESSES else None


def _try_sizes(search: Search, answer: Config, tried: Sequence[Evaluated], keep: Callable[[Evaluated], None]) -> str:
    """Evaluate until enough is known. Returns why that ended early; empty where it did not."""
    budget, history, objective = search.budget, search.history, search.history.objective
    num_samples = min(search.inspection.step_samples, answer.batch_size)
    took_s = median(history.probe_wall_s)
    while (size := next_size(tried, answer.batch_size, _most(search, tried))) is not None:
        left_s = budget.budget_s + budget.evaluation_s - budget.elapsed_s
        if search.interrupted() or took_s > left_s:
            return "interrupted" if search.interrupted() else NO_TIME
        timeout_s = budget.timeout_s(history.baseline) + history.setup_s(answer)
        settings = search.settings.replace(
            timeout_s=min(timeout_s, left_s), max_timed_s=min(MAX_TIMED_S, search.settings.max_timed_s)
        )
        config = answer.replace(batch_size=size, accumulation_steps=1)
        try:
            outcome = search.runner.run(EvaluateJob(config=config, settings=settings, num_samples=num_samples))
        except ProbeFault as fault:
            return str(fault)
        took_s = outcome.wall_s
        if outcome.kind is Kind.TIMEOUT and left_s < timeout_s:
            return NO_TIME
        # a neighbour that holds the memory, or a crash, says nothing of a size
        if outcome.kind in (Kind.ERROR, Kind.UNSUPPORTED, Kind.CRASHED) or outcome.crowded:
            return outcome.cause
        keep(_record(size, outcome, fits=outcome.ok and not objective.beyond_memory(outcome)))
    return ""


def _most(search: Search, tried: Sequence[Evaluated]) -> float:
    """The largest batch for which there is data, and which takes no longer than a micro batch of training is allowed to."""
    samples = search.inspection.facts.eval_samples or math.inf
    speeds = [one.samples_per_s for one in tried if one.samples_per_s]
    return min(samples, search.history.longest_step_s * max(speeds, default=math.inf))


def _record(size: int, outcome: Outcome, *, fits: bool) -> Evaluated:
    found = outcome.measurement
    ran = Evaluated(eval_batch_size=size, kind=str(outcome.kind), fits=fits, cause=outcome.cause)
    if found is None:
        return ran
    speed, interval = found.samples_per_s, (found.samples_per_s_low, found.samples_per_s_high)
    return replace(ran, samples_per_s=speed, samples_per_s_ci=interval, peak_bytes=found.peak_bytes)


def _fitting(tried: Sequence[Evaluated]) -> dict[int, list[Evaluated]]:
    """The processes of each batch size below the smallest that did not fit."""
    bound = min([one.eval_batch_size for one in tried if not one.fits], default=math.inf)
    sizes = sorted({one.eval_batch_size for one in tried if one.eval_batch_size < bound})
    return {size: [one for one in tried if one.eval_batch_size == size] for size in sizes}


def _logs(processes: Sequence[Evaluated]) -> list[float]:
    return [math.log(one.samples_per_s) for one in processes if one.samples_per_s]


def _best(tried: Sequence[Evaluated]) -> int | None:
    """The smallest batch size that is about as fast as the fastest."""
    levels = {size: fmean(_logs(processes)) for size, processes in _fitting(tried).items()}
    return next((size for size, level in levels.items() if level > max(levels.values()) - GAIN), None)


def _found(tried: Sequence[Evaluated], unfinished: str) -> Evaluation:
    if (best := _best(tried)) is None:
        return Evaluation(tried=tuple(tried), unfinished=unfinished or "no batch size fits")
    processes = _fitting(tried)[best]
    speed, low, high = ratio_interval(_logs(processes))
    if len(processes) == 1:
        low, high = processes[0].samples_per_s_ci or (low, high)
    return Evaluation(
        eval_batch_size=best,
        samples_per_s=speed,
        samples_per_s_ci=(low, high),
        peak_bytes=max(one.peak_bytes or 0 for one in processes),
        num_processes=len(processes),
        tried=tuple(tried),
        unfinished=unfinished,
    )
