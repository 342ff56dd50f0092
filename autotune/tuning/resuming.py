"""What a study must agree on with a search that goes on with it, and what that one takes over of it."""

from __future__ import annotations

from dataclasses import replace

from autotune.devices.calibration import arithmetic
from autotune.errors import StudyError
from autotune.records.inspection import Inspection
from autotune.records.options import SearchOptions
from autotune.records.study import Fingerprint, StudyFacts
from autotune.runners.runner import Runner
from autotune.study.place import Place
from autotune.study.store import stored_facts
from autotune.task.source import TaskSource
from autotune.techniques import Techniques
from autotune.units import format_bytes
from autotune.version import __version__


def place_within(options: SearchOptions, plain: Place, place: Place) -> Place:
    """The place of the task's study with the memory limit asked for: `plain`, or one beside it where that has another limit.

    Args:
        place: of the ranking that is searched, which may be there without a study at `plain`.
    """
    kept = stored_facts(plain) or stored_facts(place)
    known = kept.fingerprint.memory_limit_bytes if kept else None
    if known is None or options.memory_limit_bytes in (None, known):
        return plain
    assert options.memory_limit_bytes is not None
    return plain.within(options.memory_limit_bytes)


def memory_limit(options: SearchOptions, place: Place, stored: StudyFacts | None, free_bytes: int) -> int:
    """The user's limit in bytes, else that of the study that is resumed, else the free memory of the device.

    Raises:
        StudyError: so much is not free now.
    """
    if options.memory_limit_bytes is not None:
        return options.memory_limit_bytes
    earlier = stored.fingerprint.memory_limit_bytes if stored else None
    if earlier is None:
        return free_bytes
    if earlier > 1.1 * free_bytes:
        raise StudyError(
            f"the study {place.study} has a memory limit of {format_bytes(earlier)}, but only {format_bytes(free_bytes)} are free now; "
            "free memory, or give a --memory-limit that is free, which begins a study beside it"
        )
    return earlier


def options_to_repeat(
    options: SearchOptions, source: TaskSource | None, stored: StudyFacts | None
) -> dict[str, str | int]:
    """The options that must be given again to run the answer, without defaults."""
    asked = options.asked()
    if source is not None and source.overrides.get("global_batch") is not None:
        asked["global_batch"] = source.overrides["global_batch"]
    earlier = (
        stored.asked.get("memory_limit") if stored else None
    )  # goes on to hold when the study is resumed without one
    return {"memory_limit": earlier, **asked} if earlier is not None else asked


def early_fingerprint(options: SearchOptions, limit_bytes: int, runner: Runner) -> Fingerprint:
    """What must be equal for measurements to be comparable, as far as it is known before the model is imported."""
    return Fingerprint(
        memory_limit_bytes=limit_bytes,
        headroom=options.headroom,
        objective=options.objective,
        train_steps=options.train_steps,
        train_epochs=options.train_epochs,
        environment={name: value for name, value in arithmetic().items() if value} if runner.keeps_traces else {},
    )


def fingerprint(inspection: Inspection, techniques: Techniques, early: Fingerprint) -> Fingerprint:
    """All that must be equal for measurements to be comparable."""
    device, facts = inspection.device, inspection.facts
    return replace(
        early,
        autotune=__version__,
        techniques=tuple(techniques),
        choices={
            name: tuple(sorted(map(str, {*support.choices, *support.optional})))
            for name, support in inspection.support.items()
            if not techniques[name].ordered
        },
        task=facts.source_hash,
        num_parameters=facts.num_parameters,
        num_trainable=facts.num_trainable,
        parameter_bytes=facts.parameter_bytes,
        batch=facts.batch,
        device=f"{device.name} {device.model}",
        num_threads=device.num_threads,
        total_bytes=device.total_bytes,
        driver=device.driver,
        torch=device.torch_version,
        global_batch=inspection.global_batch,
    )
