"""What a finished study leaves for later searches: how each config did beside the study's own baseline, and in which circumstances.

Only ratios are kept, since they are what travels to another model, version or machine; the seconds that compiling took are the exception.
No path and nothing of the user's data is among it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from autotune.records.config import BATCH_KEYS, Choice
from autotune.records.formats import Record
from autotune.records.inspection import ModelSignature
from autotune.records.objective import Throughput
from autotune.records.outcome import Kind, Outcome
from autotune.records.result import Result
from autotune.records.study import Fingerprint, SearchFacts, Trial

# How much less a study tells that differs in one respect. They order studies and weigh them, and no answer rests on them.
SIZE_OCTAVES = 4.0  # by which models differ in parameters until their likeness is 1/e
BATCH_OCTAVES = 6.0  # the same of the samples in an optimizer step
OTHER_TYPES = 0.5  # of the parameters
OTHER_LOSS = 0.9
OTHER_TORCH = 0.9
OTHER_MODEL_OF_DEVICE = 0.6  # or another set of its instructions
OTHER_THREADS = 0.8
OTHER_KIND_OF_DEVICE = 0.1
OTHER_WORLD = 0.3
MOST_TRIALS = 100  # of several searches of one task: models are fitted to all of them


@dataclass(frozen=True, kw_only=True)
class Circumstances(Record):
    """What a study's findings depend on, as far as it tells how much they mean to another search.

    Attributes:
        signature: of the model; None where it was not seen.
        device: name and model, as in the study's fingerprint.
        environment: variables that change the device's arithmetic.
        samples_per_step: of the baseline's optimizer step.
    """

    signature: ModelSignature | None
    device: str
    num_threads: int
    environment: dict[str, str]
    torch: str
    num_processes: int
    samples_per_step: int

    @classmethod
    def of(cls, signature: ModelSignature | None, known: Fingerprint, baseline: Mapping[str, Choice]) -> Self:
        """Those of a study of that model and baseline."""
        return cls(
            signature=signature,
            device=known.device or "",
            num_threads=known.num_threads or 0,
            environment=known.environment,
            torch=known.torch or "",
            num_processes=known.num_processes or 1,
            samples_per_step=math.prod(int(baseline.get(name, 1)) for name in BATCH_KEYS),
        )

    def likeness(self, other: Circumstances, *, same_model: bool = False) -> float:
        """How much the findings of `other` mean here: 1 for the same, 0 where the models are not known.

        Args:
            same_model: whether to take the models for alike, whatever they are.
        """
        hardware = [(one.device.partition(" ")[2], one.environment) for one in (self, other)]
        factors = (
            self.likeness_in_memory(other, same_model=same_model),
            1.0 if hardware[0] == hardware[1] else OTHER_MODEL_OF_DEVICE,
            1.0 if self.num_threads == other.num_threads else OTHER_THREADS,
            1.0 if self.torch == other.torch else OTHER_TORCH,
            _nearness(self.samples_per_step, other.samples_per_step, BATCH_OCTAVES),
        )
        return math.prod(factors)

    def likeness_in_memory(self, other: Circumstances, *, same_model: bool = False) -> float:
        """The same of how much memory each config took.

        That hardly depends on the processor, its threads, torch's version, or how many micro batches a step has.
        """
        kinds = [one.device.partition(" ")[0].partition(":")[0] for one in (self, other)]
        factors = (
            1.0 if same_model else model_likeness(self.signature, other.signature),
            1.0 if kinds[0] == kinds[1] else OTHER_KIND_OF_DEVICE,
            1.0 if self.num_processes == other.num_processes else OTHER_WORLD,
        )
        return math.prod(factors)


def model_likeness(one: ModelSignature | None, other: ModelSignature | None) -> float:
    """How alike two models are, from 0 to 1: by the kinds of their layers, their sizes, their types and their loss."""
    if one is None or other is None:
        return 0.0
    by_number = _overlap(*(Counter({k: n for k, n, _ in _kinds(signature)}) for signature in (one, other)))
    by_elements = _overlap(*(Counter({k: n for k, _, n in _kinds(signature)}) for signature in (one, other)))
    return math.prod(
        (
            (by_number + by_elements) / 2,
            _nearness(one.num_parameters, other.num_parameters, SIZE_OCTAVES),
            1.0 if one.dtypes == other.dtypes else OTHER_TYPES,
            1.0 if one.loss == other.loss else OTHER_LOSS,
        )
    )


def _kinds(signature: ModelSignature) -> Iterable[tuple[str, int, int]]:
    """Each kind of layer that has parameters, with how many there are and the elements of their parameters."""
    numbers: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    for layer in signature.layers:
        if layer.shapes:
            numbers[layer.kind] += layer.count
            elements[layer.kind] += layer.count * sum(map(math.prod, layer.shapes))
    return [(kind, numbers[kind], elements[kind]) for kind in numbers]


def _overlap(one: Counter[str], other: Counter[str]) -> float:
    """What two distributions have in common, from 0 to 1."""
    sums = one.total(), other.total()
    if not all(sums):
        return float(sums[0] == sums[1])
    return sum(min(one[kind] / sums[0], other[kind] / sums[1]) for kind in one)


def _nearness(one: int, other: int, octaves: float) -> float:
    return math.exp(-abs(math.log2(max(1, one) / max(1, other))) / octaves)


@dataclass(frozen=True, kw_only=True)
class PriorTrial(Record):
    """How one config did. Speeds and peaks are over the baseline's.

    Attributes:
        speed: throughput, with the ends of its 95 % interval; 0 where it was not measured.
        speed_bound: throughput that a probe which was ended early cannot exceed; None where that is not known.
        peak: memory that a long run takes; 0 where it was not measured.
        phases: phase of an optimizer step -> its time per sample of the step, over the baseline's time per sample.
        compile_cold_s: seconds that compiling took with an empty cache.
    """

    config: dict[str, Choice]
    kind: Kind
    speed: float = 0.0
    speed_low: float = 0.0
    speed_high: float = 0.0
    speed_bound: float | None = None
    peak: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    compile_cold_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PriorStudy(Record):
    """What one study leaves.

    Attributes:
        name: the task's name and a mark that tells the study from others of it.
        baseline: its config; `space`: technique -> choices that were searched.
        answer: the config of the answer; empty where there was none.
        objective: what it is the best in.
        searched_at: when the last search began, in UTC.
    """

    name: str
    circumstances: Circumstances
    baseline: dict[str, Choice]
    space: dict[str, tuple[Choice, ...]]
    answer: dict[str, Choice]
    searched_at: str
    trials: tuple[PriorTrial, ...]
    objective: str = Throughput.name

    @classmethod
    def of(cls, facts: SearchFacts, trials: Iterable[Trial], answer: Result | None, searched_at: str) -> Self | None:
        """What a study leaves; None where its baseline was not measured, or nothing else was tried.

        The play-off's trials are left out: they measure again what the search measured.
        """
        searched = {trial.config: trial.outcome for trial in trials if not trial.in_play_off}
        baseline = next(
            (o for config, o in searched.items() if config.as_dict() == facts.baseline_config and o.ok), None
        )
        if baseline is None or len(searched) < 2:
            return None
        return cls(
            name=name_of(facts.task, facts.fingerprint),
            circumstances=Circumstances.of(facts.signature, facts.fingerprint, facts.baseline_config),
            baseline=facts.baseline_config,
            space=facts.space,
            answer=answer.config if answer is not None else {},
            objective=facts.objective,
            searched_at=searched_at,
            trials=tuple(_beside(config.as_dict(), outcome, baseline) for config, outcome in searched.items()),
        )

    def with_trials_of(self, earlier: Self) -> Self:
        """This study with the configs that an earlier search tried besides, and with its answer where this one has none.

        Speeds and peaks are over the baseline's, so nothing is taken from a search with another one.
        """
        if earlier.baseline != self.baseline:
            return self
        own = [trial.config for trial in self.trials]
        besides = [trial for trial in earlier.trials if trial.config not in own][: max(0, MOST_TRIALS - len(own))]
        both = self.space, earlier.space
        space = {
            name: tuple(dict.fromkeys(c for one in both for c in one.get(name, ()))) for one in both for name in one
        }
        return replace(self, answer=self.answer or earlier.answer, space=space, trials=(*self.trials, *besides))


def name_of(task: str, known: Fingerprint) -> str:
    """The name under which a study is remembered: a search of the same study has the same."""
    mark = hashlib.sha256(json.dumps(known.to_dict(), sort_keys=True).encode()).hexdigest()[:8]
    return f"{task} {mark}"


def _beside(config: dict[str, Choice], outcome: Outcome, baseline: Outcome) -> PriorTrial:
    assert baseline.measurement is not None
    plain, found = baseline.measurement, outcome.measurement
    if found is None:
        high = outcome.samples_per_s_high
        return PriorTrial(
            config=config, kind=outcome.kind, speed_bound=high / plain.samples_per_s if high is not None else None
        )
    step_samples = found.step_s * found.samples_per_s
    return PriorTrial(
        config=config,
        kind=outcome.kind,
        speed=found.samples_per_s / plain.samples_per_s,
        speed_low=found.samples_per_s_low / plain.samples_per_s,
        speed_high=found.samples_per_s_high / plain.samples_per_s,
        peak=found.long_run_peak_bytes / max(1, plain.long_run_peak_bytes),
        phases={name: seconds / step_samples * plain.samples_per_s for name, seconds in found.phases_s.items()},
        compile_cold_s=found.compile_cold_s,
    )
