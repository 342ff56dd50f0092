"""Every technique, by name. Adding one means adding its file and its line in `REGISTRY`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from autotune.errors import ConfigError
from autotune.records.config import Choice, Config
from autotune.records.inspection import Support
from autotune.techniques.accumulation import Accumulation
from autotune.techniques.amp import Amp
from autotune.techniques.base import Expectation, Factor, Phase, Recomputation, Setting, Technique, UnsupportedError
from autotune.techniques.batch_size import BatchSize
from autotune.techniques.channels_last import ChannelsLast
from autotune.techniques.checkpoint_segments import CheckpointSegments
from autotune.techniques.matmul_precision import MatmulPrecision
from autotune.techniques.num_workers import NumWorkers
from autotune.techniques.optimizer_impl import OptimizerImpl
from autotune.techniques.persistent_workers import PersistentWorkers
from autotune.techniques.pin_memory import PinMemory
from autotune.techniques.prefetch_factor import PrefetchFactor

__all__ = [
    "REGISTRY",
    "Expectation",
    "Factor",
    "Phase",
    "Recomputation",
    "Setting",
    "Support",
    "Technique",
    "UnsupportedError",
    "complete",
    "divisors",
    "known",
    "validate",
    "with_baseline_batch",
]

_TECHNIQUES: tuple[Technique, ...] = (
    BatchSize(),
    Accumulation(),
    Amp(),
    MatmulPrecision(),
    ChannelsLast(),
    CheckpointSegments(),
    OptimizerImpl(),
    NumWorkers(),
    PinMemory(),
    PersistentWorkers(),
    PrefetchFactor(),
)

REGISTRY: Mapping[str, Technique] = {technique.name: technique for technique in _TECHNIQUES}


def known(name: str) -> Technique:
    """The technique of that name.

    Raises:
        ConfigError: there is none; the nearest names are offered.
    """
    if name not in REGISTRY:
        raise ConfigError(f"{name!r} is not a technique{_nearest(name, REGISTRY)}; there are: {', '.join(REGISTRY)}")
    return REGISTRY[name]


def validate(name: str, choice: Any) -> Choice:
    """Return `choice` if it is one that the technique `name` knows.

    Raises:
        ConfigError: unknown name, or not a choice of it.
    """
    technique = known(name)
    try:
        return technique.validate(choice)
    except ValueError as error:
        raise ConfigError(f"{choice!r} is not a choice of {name}: {error}") from None


def complete(choices: Mapping[str, Any], *, global_batch: int | None = None) -> Config:
    """A full config from a partial config dict: what is missing is off, accumulation follows from the global batch.

    Raises:
        ConfigError: an unknown key, an invalid choice, or a batch size that does not divide the global batch.
    """
    given = {name: validate(name, choice) for name, choice in choices.items()}
    full = {name: given.get(name, technique.off) for name, technique in REGISTRY.items()}
    if global_batch is not None:
        if "batch_size" not in given:
            full["batch_size"] = max(d for d in divisors(global_batch) if d <= int(BatchSize.off))
        batch_size = int(full["batch_size"])
        if global_batch % batch_size:
            near = min(divisors(global_batch), key=lambda d: abs(d - batch_size))
            raise ConfigError(
                f"batch_size {batch_size} does not divide the global batch {global_batch}, so accumulation cannot keep it; "
                f"the nearest batch_size that does is {near}"
            )
        if "accumulation_steps" not in given:
            full["accumulation_steps"] = global_batch // batch_size
    return Config(tuple(full.items()))


def with_baseline_batch(choices: Mapping[str, Any], baseline: Mapping[str, Any] | None) -> dict[str, Any]:
    """A partial config dict with the batch size of the task's baseline where it names none."""
    stated = {"batch_size": baseline["batch_size"]} if baseline and "batch_size" in baseline else {}
    return {**stated, **choices}


def divisors(number: int) -> list[int]:
    """All divisors, in increasing order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    return f" (did you mean {' or '.join(near)}?)" if near else ""
