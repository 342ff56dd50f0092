"""Which configs fit into a given memory, as a memory model predicts before anything has run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from autotune.devices import capabilities_of
from autotune.errors import TaskError
from autotune.prediction.memory import MemoryEstimate, MemoryModel
from autotune.prediction.traces import Traces
from autotune.records.capacity import LARGEST_BATCH, GroupPrediction, MemoryPrediction, PredictedPeak
from autotune.records.config import Choice, Config
from autotune.records.device import Communicators
from autotune.records.inspection import Inspection
from autotune.space import Space
from autotune.units import format_seconds

ALIKE = 0.005  # of the peak: combinations that differ by less are shown as one


def predict_fit(
    inspection: Inspection,
    space: Space,
    traces: Traces,
    asked: Config | None,
    *,
    memory_limit_bytes: int,
    headroom: float,
    ended_after_s: float | None,
    trace_s: float,
    wall_s: float,
) -> MemoryPrediction:
    """What traces say of one config, or of every combination of techniques.

    Args:
        asked: the config; None for all combinations.
        ended_after_s: seconds after which tracing was ended; None where all was traced.

    Raises:
        TaskError: nothing that was asked for could be traced; the message says why.
    """
    question = Question(
        space,
        MemoryModel(traces, inspection.outside_bytes, space, communicators=inspection.communicators).estimates,
        outside_bytes=inspection.outside_bytes,
        communicators=inspection.communicators,
        limit_bytes=memory_limit_bytes,
        usable_bytes=int(memory_limit_bytes * (1 - headroom)),
        dataset_size=inspection.facts.dataset_size,
    )
    config = question.peak(asked) if asked is not None else None
    groups = tuple(question.groups() if asked is None else ())
    if config is None and not groups:
        raise TaskError(
            f"the memory of {inspection.facts.name} cannot be predicted: {'; '.join(sorted({*traces.failures.values()}))}; "
            "`autotune search` learns it from probes instead"
        )
    warnings = list(_warnings(inspection, config, groups))
    if ended_after_s is not None:
        warnings.append(f"tracing was ended after {format_seconds(ended_after_s)}; give it more time with --timeout")
    fits = question.fits(config) if config is not None else any(group.fits for group in groups)
    return MemoryPrediction(
        task=inspection.facts.name,
        device=inspection.devices,
        on_gpu=capabilities_of(traces.target).own_memory,
        communicators=inspection.communicators,
        memory_limit_bytes=memory_limit_bytes,
        headroom=headroom,
        global_batch=inspection.global_batch,
        fits=fits,
        config=config,
        groups=groups,
        untraced=dict(traces.failures),
        left_out={
            name: reason
            for name in space.techniques
            if question.shapes_memory(name) and (reason := _why_left_out(inspection, space, name))
        },
        warnings=tuple(warnings),
        trace_s=trace_s,
        wall_s=wall_s,
    )


def _why_left_out(inspection: Inspection, space: Space, name: str) -> str:
    reasons = [inspection.support[name].reason, *(space.why_untraced(name, choice) for choice in space.choices[name])]
    return "; ".join(dict.fromkeys(filter(None, reasons)))


def _warnings(inspection: Inspection, config: PredictedPeak | None, groups: Sequence[GroupPrediction]) -> Iterator[str]:
    if config is not None:
        for name, choice in config.config.items():
            support = inspection.support_of(name)
            if support.reason and choice not in (*support.choices, *support.optional):
                yield f"{name}={choice} does not apply here: {support.reason}"
    if inspection.built_for_real:
        yield f"the model was built for real, in the host's memory: {inspection.built_for_real}"
    optional = inspection.batch.optional_accumulation_steps
    if any(group.peak.config["accumulation_steps"] in optional for group in groups):
        yield inspection.batch.reason


@dataclass(frozen=True)
class Question:
    """How much of a memory configs would take.

    Args:
        estimates: the peaks of configs; None where nothing is known.
        outside_bytes: what a process holds on the device before the model is built.
        communicators: what it holds beside that in a world.
        limit_bytes, usable_bytes: the most that the upper bound of a peak, and the peak itself, may be.
        dataset_size: samples in the training set, which bounds the batch; None without one.
    """

    space: Space
    estimates: Callable[[Sequence[Config]], Sequence[MemoryEstimate | None]]
    outside_bytes: int
    communicators: Communicators
    limit_bytes: int
    usable_bytes: int
    dataset_size: int | None

    def peak(self, config: Config) -> PredictedPeak | None:
        """The peak of a config; None where it was not traced."""
        return self.peaks([config])[0]

    def peaks(self, configs: Sequence[Config]) -> list[PredictedPeak | None]:
        """The peak of each config."""
        return [self._peak_of(*pair) for pair in zip(configs, self.estimates(configs), strict=True)]

    def _peak_of(self, config: Config, estimate: MemoryEstimate | None) -> PredictedPeak | None:
        if estimate is None or (breakdown := estimate.breakdown) is None:
            return None
        number = self.space.techniques.num_communicators(config, self.space.world)
        outside_bytes = self.outside_bytes + self.communicators.bytes_of(number)
        return PredictedPeak(
            config=config.as_dict(),
            peak_bytes=estimate.peak_bytes,
            peak_low_bytes=estimate.low_bytes,
            peak_high_bytes=estimate.high_bytes,
            chance_to_fit=estimate.chance_within(self.usable_bytes),
            allocator_bytes=estimate.peak_bytes - outside_bytes - breakdown.total_bytes,
            outside_bytes=outside_bytes,
            num_communicators=number,
            **asdict(breakdown),
        )

    def fits(self, peak: PredictedPeak | None) -> bool:
        """Whether a peak is within the limit less headroom, and within the limit in all likelihood."""
        return peak is not None and peak.peak_bytes <= self.usable_bytes and peak.peak_high_bytes <= self.limit_bytes

    def groups(self) -> list[GroupPrediction]:
        """Every combination that was traced; those of the same memory once, as the one with the fewest techniques."""
        found = self._largest(list(self._combinations()))
        groups = {}
        by_effort = sorted(found, key=lambda group: len(group.switched_on))
        while by_effort:
            first, *others = by_effort
            alike = [other for other in others if _alike(first, other)]
            by_effort = [other for other in others if other not in alike]
            groups[found.index(first)] = replace(first, same_memory=tuple(other.switched_on for other in alike))
        return [groups[place] for place in sorted(groups)]

    def shapes_memory(self, name: str) -> bool:
        """Whether a key of a config is a technique that changes what a training step holds."""
        return name in self.space.techniques and self.space.techniques[name].shapes_memory

    def _combinations(self) -> Iterator[dict[str, Choice]]:
        """Every combination of what is searched, and can be traced, of the techniques that shape memory."""
        searched = {
            name: [choice for choice in choices if not self.space.why_untraced(name, choice)]
            for name, choices in self.space.choices.items()
            if self.shapes_memory(name)
        }
        for values in itertools.product(*searched.values()):
            yield dict(zip(searched, values, strict=True))

    def _largest(self, combinations: Sequence[Mapping[str, Choice]]) -> list[GroupPrediction]:
        """The predictions for the combinations that were traced: at the largest batch size that fits, or at the smallest there is.

        The sizes of all combinations are halved together, since a model tells thousands of peaks at once far sooner than one by one.
        """
        if self.space.global_batch is not None:
            sizes: Sequence[int] = [int(size) for size in self.space.choices["batch_size"]]
        else:
            sizes = range(1, (self.dataset_size or LARGEST_BATCH) + 1)

        def peaks_at(places: Mapping[int, int]) -> dict[int, PredictedPeak | None]:
            """The peaks of combinations, each with a place in `sizes`, by the combination's number."""
            configs = [
                self.space.complete({**combinations[number], "batch_size": sizes[place]})
                for number, place in places.items()
            ]
            return dict(zip(places, self.peaks(configs), strict=True))

        smallest = peaks_at(dict.fromkeys(range(len(combinations)), 0))
        found = {number: peak for number, peak in smallest.items() if peak is not None}
        bounds = {number: (0, len(sizes)) for number in found}
        while middles := {number: (low + high) // 2 for number, (low, high) in bounds.items() if low < high}:
            for number, peak in peaks_at(middles).items():
                (low, high), middle = bounds[number], middles[number]
                if peak is not None and self.fits(peak):
                    bounds[number], found[number] = (middle + 1, high), peak
                else:
                    bounds[number] = (low, middle)
        return [self._group(peak, bounds[number][0], len(sizes)) for number, peak in found.items()]

    def _group(self, peak: PredictedPeak, num_fitting: int, num_sizes: int) -> GroupPrediction:
        shaping = {name: choice for name, choice in peak.config.items() if self.shapes_memory(name)}
        return GroupPrediction(
            switched_on={
                name: choice for name, choice in shaping.items() if not self.space.techniques.is_off(name, choice)
            },
            same_memory=(),
            peak=peak,
            fits=num_fitting > 0,
            bounded=0 < num_fitting == num_sizes,
        )


def _alike(one: GroupPrediction, other: GroupPrediction) -> bool:
    """Whether what `other` switches on beside `one` makes no difference."""
    if {**one.switched_on, **other.switched_on} != other.switched_on:
        return False
    same_batch = one.peak.config["batch_size"] == other.peak.config["batch_size"]
    return same_batch and abs(one.peak.peak_bytes - other.peak.peak_bytes) < ALIKE * one.peak.peak_bytes
