"""Explains a config: what lives at its peak and where its time goes, and what each technique alone would change."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autotune.devices import capabilities_of
from autotune.devices.targets import Target
from autotune.records.config import ACCUMULATION, BATCH_SIZE, Choice, Config, ProbeSettings, describe_batch
from autotune.records.explanation import LOSS, Advice, Anatomy, Explanation, ModuleTimes, Remark, fold_repeats
from autotune.records.inspection import Inspection
from autotune.records.outcome import Outcome
from autotune.runners.jobs import AnatomyJob, JobFailed, ModulesJob
from autotune.runners.runner import Runner
from autotune.techniques import Techniques

WORTH = 0.01  # of the peak: what saves less is not worth advising
NOTABLE = 0.15  # of the peak: a part this large gets a remark
REMEDIED = 0.3  # of a part: what saves less of it is no remedy
NUM_REMARKS = 4
IN_FLIGHT = ("activations", "temporaries")
OF_PARAMETERS = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True)
class _Alternative:
    """A config that differs by one choice."""

    config: Config
    choices: dict[str, Choice]
    label: str
    included: bool
    changes_learning: bool
    note: str


def dissect(
    runner: Runner,
    inspection: Inspection,
    config: Config,
    *,
    target: Target,
    settings: ProbeSettings | None,
    timeout_s: float,
) -> Explanation:
    """Trace a config and what differs from it by one choice, as rank 0 runs it; measure it where `settings` say how.

    Args:
        target: the kind of device to explain for.
        settings: of the measured run; None where the device is not there, or where several train together.
        timeout_s: seconds after which no further config is traced; the first one may take twice as long.
    """
    started_s = runner.now_s()
    alternatives, unpredicted = _alternatives(inspection, config, runner.techniques)
    memory, untraced, found = _trace(runner, inspection, [config, *(a.config for a in alternatives)], target, timeout_s)
    trace_s = runner.now_s() - started_s
    pairs = list(zip(alternatives, found, strict=False))
    late = f"not traced within {timeout_s:.0f} s; give it more time with --timeout"
    unpredicted |= {a.label: late for a in alternatives[len(found) :]} if memory is not None else {}
    unpredicted |= {a.label: one for a, one in pairs if isinstance(one, str)}
    traced = [(a, one) for a, one in pairs if isinstance(one, Anatomy)]
    advice = tuple(_advice(config, memory, traced)) if memory is not None else ()
    probe, times, untimed = _measure(runner, config, settings)
    number = runner.techniques.num_communicators(config, inspection.known_world)
    return Explanation(
        task=inspection.facts.name,
        device=inspection.devices,
        on_gpu=capabilities_of(inspection.device.name).own_memory,
        config=config.as_dict(),
        memory=memory,
        untraced=untraced,
        outside_bytes=inspection.outside_bytes + inspection.communicators.bytes_of(number),
        num_communicators=number,
        communicators=inspection.communicators,
        probe=probe,
        times=times,
        untimed=untimed,
        advice=advice,
        no_gain=tuple(a.label for a, _ in traced if a.label not in {one.label for one in advice}),
        not_predicted=unpredicted,
        remarks=tuple(_remarks(memory, {a.label: one for a, one in traced}, advice)) if memory is not None else (),
        trace_s=trace_s,
        wall_s=runner.now_s() - started_s,
    )


def _trace(
    runner: Runner, inspection: Inspection, configs: list[Config], target: Target, timeout_s: float
) -> tuple[Anatomy | None, str, tuple[Anatomy | str, ...]]:
    """The anatomy of the first config, or why there is none, and those of the others as far as there was time."""
    if why := _untraceable(inspection, configs[0], runner.techniques):
        return None, why, ()
    world = inspection.known_world
    job = AnatomyJob(configs=tuple(configs), target=target, world=world, slice_s=timeout_s, timeout_s=2 * timeout_s)
    try:
        first, *others = runner.run(job)
    except JobFailed as failed:
        return None, str(failed), ()
    return (None, first, ()) if isinstance(first, str) else (first, "", tuple(others))


def _untraceable(inspection: Inspection, config: Config, techniques: Techniques) -> str:
    """Why whole steps of the config cannot be traced, as the inspection found it, because asking a technique may import torch."""
    found = []
    for name, choice in techniques.switched_on(config):
        technique = techniques[name]
        if not technique.traced_in_whole_steps:
            reasons = dict(inspection.support_of(name).untraceable)
            # a choice on a scale may not have been inspected itself
            found.append(next(iter(reasons.values()), "") if technique.ordered else reasons.get(choice, ""))
    return "; ".join(filter(None, found))


def _measure(
    runner: Runner, config: Config, settings: ProbeSettings | None
) -> tuple[Outcome | None, ModuleTimes | None, str]:
    """A probe of the config and the times of its modules, which are made to sum to the probe's phases."""
    if settings is None:
        return None, None, "the devices are not in this machine, or several of them train together"
    probe = runner.probe(config, settings)
    if probe.measurement is None:
        return probe, None, probe.cause
    try:
        found = runner.run(ModulesJob(config=config, settings=settings))
    except JobFailed as failed:
        return probe, None, str(failed)
    if not found.seconds:
        return probe, found, "the step runs as one unit, into which hooks of modules do not reach"
    phases = probe.measurement.phases_s
    sums: dict[str, float] = {}
    for seconds in found.seconds.values():
        for phase, value in seconds.items():
            sums[phase] = sums.get(phase, 0.0) + value
    scaled = {
        module: {
            phase: value * phases.get(phase, sums[phase]) / sums[phase] for phase, value in seconds.items() if value
        }
        for module, seconds in found.seconds.items()
    }
    return probe, replace(found, seconds=scaled), ""


def _alternatives(
    inspection: Inspection, config: Config, techniques: Techniques
) -> tuple[list[_Alternative], dict[str, str]]:
    """Half the micro batch, and of each technique that shapes memory one choice, or every choice where they have no order."""
    found, unpredicted = [*_half_batch(inspection, config)], {}
    for name, technique in techniques.items():
        support = inspection.support_of(name)
        choices = [choice for choice in (*support.choices, *support.optional) if choice != technique.off]
        if not technique.shapes_memory or config[name] != technique.off or not choices:
            continue
        if technique.ordered:
            choices = [technique.least_memory(choices) or choices[-1]]
        for choice in choices:
            changed = config.replace(**{name: choice})
            if technique.is_redundant(changed) or technique.traced_as(choice) == technique.off:
                continue
            label = techniques.label(name, choice)
            if why := _untraceable(inspection, changed, techniques):
                unpredicted[label] = why
                continue
            included = choice in support.choices
            note = support.note or ("" if included else support.reason)
            found.append(_Alternative(changed, {name: choice}, label, included, technique.changes_learning, note))
    return found, unpredicted


def _half_batch(inspection: Inspection, config: Config) -> Iterator[_Alternative]:
    """The largest micro batch of at most half the size that keeps the samples of a step."""
    samples = config.samples_per_step
    sizes = [size for size in range(1, config.batch_size // 2 + 1) if samples % size == 0]
    if not sizes:
        return
    batch = {BATCH_SIZE: sizes[-1], ACCUMULATION: samples // sizes[-1]}
    changed = config.replace(**batch)
    known = inspection.batch.accumulation_steps
    must_stay = inspection.facts.has_batchnorm or inspection.batch.stays_whole
    changes_learning = must_stay and batch[ACCUMULATION] not in known
    included = batch[ACCUMULATION] in known
    note = inspection.batch.note or ("" if included else inspection.batch.reason)
    yield _Alternative(changed, dict(batch), describe_batch(changed), included, changes_learning, note)


def _advice(config: Config, memory: Anatomy, traced: Iterable[tuple[_Alternative, Anatomy]]) -> Iterator[Advice]:
    """What saves memory, most first."""
    found = []
    flops, moved_bytes = memory.work(config.accumulation_steps)
    for alternative, anatomy in traced:
        saves = memory.peak_bytes - anatomy.peak_bytes
        works = anatomy.work(alternative.config.accumulation_steps)
        if saves < WORTH * memory.peak_bytes:
            continue
        found.append(
            Advice(
                choices=alternative.choices,
                label=alternative.label,
                saves_bytes=saves,
                flops_ratio=works[0] / flops if flops else 1.0,
                moved_ratio=works[1] / moved_bytes if moved_bytes else 1.0,
                included=alternative.included,
                changes_learning=alternative.changes_learning,
                note=alternative.note,
            )
        )
    yield from sorted(found, key=lambda advice: -advice.saves_bytes)


def _remarks(memory: Anatomy, anatomies: Mapping[str, Anatomy], advice: Sequence[Advice]) -> Iterator[Remark]:
    """The largest parts of the memory, each with the advice that saves most of it."""
    found = []
    for part, names, kinds in _parts(memory):
        held_bytes = _held(memory, names, kinds)
        if held_bytes < NOTABLE * memory.peak_bytes:
            continue
        saved = {one.label: held_bytes - _held(anatomies[one.label], names, kinds) for one in advice}
        # the remedy that saves most of the part; on a tie, the one that saves most in all
        remedies = [o for o in advice if saved[o.label] >= REMEDIED * held_bytes and not o.changes_learning]
        best = max(remedies, key=lambda one: (saved[one.label], one.saves_bytes), default=None)
        found.append(
            Remark(
                part=part,
                held_bytes=held_bytes,
                share=held_bytes / memory.peak_bytes,
                remedy=best.label if best else "",
                saves_bytes=best.saves_bytes if best else 0,
            )
        )
    yield from sorted(found, key=lambda remark: -remark.held_bytes)[:NUM_REMARKS]


def _parts(memory: Anatomy) -> Iterator[tuple[str, Collection[str], Collection[str]]]:
    """The parts that may be large, each as a name in words, its modules and its kinds of storages."""
    last = memory.last_layer
    if last:
        yield f"the results of the last layer `{last}` and of the loss", {last, LOSS}, IN_FLIGHT
    else:
        yield "the results of the loss", {LOSS}, IN_FLIGHT
    for fold in fold_repeats({module.name: module.total_bytes for module in memory.modules}):
        names = fold.names - {last, LOSS}
        yield f"the activations of `{fold.label}`", names, IN_FLIGHT
        yield f"the parameters of `{fold.label}` with their gradients and optimizer state", fold.names, OF_PARAMETERS


def _held(anatomy: Anatomy, names: Collection[str], kinds: Collection[str]) -> int:
    modules = (module for module in anatomy.modules if module.name in names)
    return sum(module.held_bytes.get(kind, 0) for module in modules for kind in kinds)
