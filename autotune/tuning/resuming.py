"""What a study must agree on with a search that goes on with it, and what that one takes over of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune import techniques
from autotune.devices.calibration import arithmetic
from autotune.errors import StudyError
from autotune.records.inspection import Inspection
from autotune.records.options import SearchOptions
from autotune.runners.runner import Runner
from autotune.study.place import Place
from autotune.study.store import stored_attributes
from autotune.task.source import TaskSource
from autotune.units import format_bytes
from autotune.version import __version__


def place_within(options: SearchOptions, plain: Place, place: Place) -> Place:
    """The place of the task's study with the memory limit asked for: `plain`, or one beside it where that has another limit.

    Args:
        place: of the ranking that is searched, which may be there without a study at `plain`.
    """
    kept = stored_attributes(plain) or stored_attributes(place)
    known = kept.get("fingerprint", {}).get("memory_limit_bytes")
    if known is None or options.memory_limit_bytes in (None, known):
        return plain
    assert options.memory_limit_bytes is not None
    return plain.within(options.memory_limit_bytes)


def memory_limit(options: SearchOptions, place: Place, stored: Mapping[str, Any], free_bytes: int) -> int:
    """The user's limit in bytes, else that of the study that is resumed, else the free memory of the device.

    Raises:
        StudyError: so much is not free now.
    """
    if options.memory_limit_bytes is not None:
        return options.memory_limit_bytes
    earlier: int | None = stored.get("fingerprint", {}).get("memory_limit_bytes")
    if earlier is None:
        return free_bytes
    if earlier > 1.1 * free_bytes:
        raise StudyError(
            f"the study {place.study} has a memory limit of {format_bytes(earlier)}, but only {format_bytes(free_bytes)} are free now; "
            "free memory, or give a --memory-limit that is free, which begins a study beside it"
        )
    return earlier


def options_to_repeat(
    options: SearchOptions, source: TaskSource | None, stored: Mapping[str, Any]
) -> dict[str, str | int]:
    """The options that must be given again to run the answer, without defaults."""
    asked = options.asked()
    if source is not None and source.overrides.get("global_batch") is not None:
        asked["global_batch"] = source.overrides["global_batch"]
    earlier = stored.get("asked", {}).get("memory_limit")  # goes on to hold when the study is resumed without one
    return {"memory_limit": earlier, **asked} if earlier is not None else asked


def early_fingerprint(options: SearchOptions, limit_bytes: int, runner: Runner) -> dict[str, Any]:
    """What else must be equal, and is known before the model is imported."""
    asked = {"memory_limit_bytes": limit_bytes, "headroom": options.headroom, "objective": options.objective}
    lengths = {"train_steps": options.train_steps, "train_epochs": options.train_epochs}
    asked |= {name: length for name, length in lengths.items() if length is not None}
    return {**asked, **(arithmetic() if runner.keeps_traces else {})}


def fingerprint(inspection: Inspection) -> dict[str, Any]:
    """What must be equal for measurements to be comparable, as far as it takes an inspection to know."""
    device, facts = inspection.device, inspection.facts
    choices = {
        name: sorted(map(str, {*support.choices, *support.optional}))
        for name, support in inspection.support.items()
        if not techniques.REGISTRY[name].ordered
    }
    return {
        "autotune": __version__,
        "techniques": list(techniques.REGISTRY),
        "choices": choices,
        "task": facts.source_hash,
        # a model file may read its sizes from elsewhere
        **{name: getattr(facts, name) for name in ("num_parameters", "num_trainable", "parameter_bytes")},
        "batch": list(facts.batch),
        "device": f"{device.name} {device.model}",
        "num_threads": device.num_threads,
        "total_bytes": device.total_bytes,
        "driver": device.driver,
        "torch": device.torch_version,
        "global_batch": inspection.global_batch,
    }
