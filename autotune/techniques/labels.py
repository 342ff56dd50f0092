"""A config in a few words."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.records.batch_plan import ACCUMULATION, BATCH_KEYS, BATCH_SIZE
from autotune.records.config import Choice, Config
from autotune.techniques import REGISTRY, label_of

AnyConfig = Config | Mapping[str, Choice]


def as_dict(config: AnyConfig) -> dict[str, Choice]:
    """Any form of a config as a plain dict."""
    return config.as_dict() if isinstance(config, Config) else dict(config)


def describe(config: AnyConfig, baseline: AnyConfig | None = None) -> str:
    """`batch 16 x3, bf16, 2 checkpoint segments, fused`; with a baseline only what differs from it.

    `x3` stands for accumulation over three micro batches. Without a baseline whatever is off is left out.
    """
    full = as_dict(config)
    reference = None if baseline is None else as_dict(baseline)
    same_batch = reference is not None and all(full.get(name) == reference.get(name) for name in BATCH_KEYS)
    words = [] if same_batch else [describe_batch(full)]
    for name, choice in full.items():
        if name in BATCH_KEYS:
            continue
        off = REGISTRY[name].off if name in REGISTRY else None
        if choice != (off if reference is None else reference.get(name, off)):
            words.append(label_of(name, choice))
    return ", ".join(words) if words else "as the baseline"


def describe_batch(config: AnyConfig) -> str:
    """`batch 16 x3`: 16 samples a micro batch, accumulated over three."""
    full = as_dict(config)
    steps = full.get(ACCUMULATION, 1)
    return label_of(BATCH_SIZE, full[BATCH_SIZE]) + ("" if steps == 1 else f" x{steps}")
