"""Which micro batches and accumulation steps are worth searching for a task."""

from __future__ import annotations

from dataclasses import replace

from autotune.records.check import Coupling, Verdict
from autotune.records.config import ACCUMULATION, BATCH_SIZE, BatchPlan, divisors, share_of
from autotune.records.inspection import BatchSupport
from autotune.units import plural

# Each octave has the sizes 1, 1.25 and 1.5 times its start: steps of 1.2x to 1.33x, multiples of 8 from 32 on, as tensor cores want.
_OCTAVE_QUARTERS = (4, 5, 6)
ONE_BATCH = "no global batch is given, so every step takes one batch"
_BATCH_STATISTICS = (
    "batch normalisation sees one micro batch at a time: accumulation learns something else than the whole batch at once, so compare "
    "validation results before changing accumulation_steps"
)
_MOVED = (
    "each forward pass of your training code changes {moved}, so that it changes once for every micro batch, and not once for every "
    "optimizer step: set its rate (the decay of a moving average, say) for the new number of micro batches, or keep today's with --fix "
    "accumulation_steps={most}"
)
_RANGE_BELOW, _RANGE_ABOVE = 16, 64  # sizes from baseline / 16 to baseline x 64 are searched


def batch_support(
    baseline: BatchPlan,
    *,
    global_batch: int | None,
    dataset_size: int | None = None,
    normalises: bool = False,
    fixed_accumulation: str = "",
    whole_step: str = "",
    coupling: Coupling | None = None,
    moved: str = "",
) -> BatchSupport:
    """Which batch sizes and accumulation steps to search. Sizes divide a process's share of the global batch; without one they rise
    by about 1.25x.

    Args:
        global_batch: samples of a step, of all processes of the baseline's world together.
        normalises: whether the model has batch normalisation.
        fixed_accumulation: why the task's accumulation may not change; empty where it may.
        whole_step: why a step takes all of the global batch at once; empty where it may accumulate.
        coupling: whether micro batches give the gradient of the whole batch; None where that was not looked into.
        moved: what each forward pass changes in place beside batch statistics; empty where it changes nothing.

    With batch normalisation the micro batch is part of what is learned: a gradient cosine of 0.33 was measured between
    micro batches of 2 and 8. Accumulating more than the baseline is then optional. Where the loss couples the samples of a
    batch, every micro batch but the baseline's is optional; where it is not known whether it does, every smaller one is.
    """
    if global_batch is not None:
        global_batch = share_of(global_batch, baseline.world)
    if whole_step and global_batch is not None:
        return BatchSupport(sizes=(global_batch,), sizes_reason=whole_step, reason=whole_step)
    if global_batch is not None:
        sizes = divisors(global_batch)
    else:
        low, high = max(1, baseline.batch_size // _RANGE_BELOW), baseline.batch_size * _RANGE_ABOVE
        sizes = [size for size in fine_sizes(high) if size >= low]
    allowed = {size for size in sizes if dataset_size is None or size <= dataset_size} | {baseline.batch_size}
    bounded = dataset_size is not None and sizes[-1] > dataset_size
    found = BatchSupport(
        sizes=tuple(sorted(allowed)),
        sizes_reason=f"the training set has {dataset_size} samples; larger batches are left out" if bounded else "",
    )
    must_stay = coupling is not None and not coupling.may_be_cut
    if coupling is not None and must_stay and (global_batch is None or not fixed_accumulation):
        return _whole(found, baseline, global_batch, coupling)
    if global_batch is None:
        return replace(found, reason=ONE_BATCH)
    steps = divisors(global_batch)
    most = baseline.accumulation_steps
    if moved:
        found = replace(found, note=_MOVED.format(moved=moved, most=most))
    if fixed_accumulation:
        return replace(
            found,
            accumulation_steps=(most,),
            optional_accumulation_steps=tuple(step for step in steps if step != most),
            reason=fixed_accumulation,
            stays_whole=must_stay,
        )
    if not normalises or most >= steps[-1]:
        return replace(found, accumulation_steps=tuple(steps))
    return replace(
        found,
        accumulation_steps=tuple(step for step in steps if step <= most),
        optional_accumulation_steps=tuple(step for step in steps if step > most),
        reason=(
            f"the model has batch normalisation, so accumulating more than the baseline's {plural(most, 'micro step')} "
            "normalises over smaller batches, which changes what is learned"
        ),
        note="; ".join(filter(None, (_BATCH_STATISTICS, found.note))),
    )


def _whole(found: BatchSupport, baseline: BatchPlan, global_batch: int | None, coupling: Coupling) -> BatchSupport:
    """The choices where the baseline's batch must not be cut, or where it is not known whether it may be."""
    is_coupled = coupling.verdict is Verdict.COUPLED
    if global_batch is None:
        if not is_coupled:  # nothing is cut: the user left the batch open
            return replace(found, reason=ONE_BATCH)
        return replace(
            found,
            sizes=(baseline.batch_size,),
            optional_sizes=found.sizes,
            sizes_reason=f"{coupling.reason}; so the batch stays at {baseline.batch_size}: {coupling.allows(BATCH_SIZE)}",
            reason=ONE_BATCH,
        )
    steps, most = divisors(global_batch), baseline.accumulation_steps
    kept = tuple(step for step in steps if step == most or (step < most and not is_coupled))
    num = baseline.world.data_parallel
    if most > 1 and not is_coupled:
        stays = "so the batch is not cut further than you cut it today"
    elif most > 1:
        stays = (
            f"what you run today cuts it into {most} micro batches of {baseline.batch_size}, which is not the loss over all "
            f"{global_batch}, and a search leaves that as it is"
        )
    elif num > 1:
        stays = (
            f"so each of the {num} processes takes its {global_batch} samples of a step in one micro batch; its loss is over these, "
            f"and not over all {num * global_batch} as in one process"
        )
    else:
        stays = "so the batch is not cut into micro batches"
    return replace(
        found,
        accumulation_steps=kept,
        optional_accumulation_steps=tuple(step for step in steps if step not in kept),
        reason=f"{coupling.reason}; {stays}: {coupling.allows(ACCUMULATION)}",
        note=(f"{coupling.reason}; compare validation results before you use other micro batches than the baseline's"),
        stays_whole=True,
    )


def fine_sizes(high: int) -> list[int]:
    """Sizes from 1 to `high` in about 1.25x steps: 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, ..."""
    sizes = {1, 2, 3}
    octave = 4
    while octave <= high:
        sizes.update(octave * quarters // 4 for quarters in _OCTAVE_QUARTERS)
        octave *= 2
    return sorted(size for size in sizes if size <= high)
