"""Which micro batches and accumulation steps are worth searching for a task."""

from __future__ import annotations

from dataclasses import replace

from autotune.records.batch_plan import BatchPlan, divisors
from autotune.records.inspection import BatchSupport
from autotune.units import plural

# Each octave is cut at 1, 1.25 and 1.5: steps of 1.2x to 1.33x, multiples of 8 from 32 on (tensor cores want those).
_OCTAVE_QUARTERS = (4, 5, 6)
_RANGE_BELOW, _RANGE_ABOVE = 16, 64  # searched: baseline / 16 to baseline x 64


def batch_support(
    baseline: BatchPlan,
    *,
    global_batch: int | None,
    dataset_size: int | None = None,
    normalises: bool = False,
    fixed_accumulation: str = "",
    whole_step: str = "",
) -> BatchSupport:
    """Which batch sizes and accumulation steps to search: the exact divisors of the global batch, or steps of about 1.25x.

    Args:
        normalises: the model has batch normalisation.
        fixed_accumulation: of the task.
        whole_step: why a step takes all of the global batch at once; empty where it may accumulate.

    With batch normalisation the micro batch is part of what is learned: a gradient cosine of 0.33 was measured between
    micro batches of 2 and 8. Accumulating more than the baseline is then an optional choice.
    """
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
    if global_batch is None:
        return replace(found, reason="no global batch is given, so every step takes one batch")
    steps = divisors(global_batch)
    most = baseline.accumulation_steps
    if fixed_accumulation:
        return replace(
            found,
            accumulation_steps=(most,),
            optional_accumulation_steps=tuple(step for step in steps if step != most),
            reason=fixed_accumulation,
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
        note=(
            "batch normalisation sees one micro batch at a time: accumulation learns something else than the whole "
            "batch at once, so compare validation results before changing accumulation_steps"
        ),
    )


def fine_sizes(high: int) -> list[int]:
    """Sizes from 1 to `high` in about 1.25x steps: 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, ..."""
    sizes = {1, 2, 3}
    octave = 4
    while octave <= high:
        sizes.update(octave * quarters // 4 for quarters in _OCTAVE_QUARTERS)
        octave *= 2
    return sorted(size for size in sizes if size <= high)
