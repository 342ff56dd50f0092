"""A config in a few words, and as text to paste."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping

from autotune.records.config import Choice, Config
from autotune.techniques import REGISTRY

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
    words = [] if _same_batch(full, reference) else [describe_batch(full)]
    for name, choice in full.items():
        if name in ("batch_size", "accumulation_steps"):
            continue
        off = REGISTRY[name].off if name in REGISTRY else None
        if choice != (off if reference is None else reference.get(name, off)):
            words.append(describe_choice(name, choice))
    return ", ".join(words) if words else "as the baseline"


def describe_batch(config: Mapping[str, Choice]) -> str:
    """`batch 16 x3`: 16 samples a micro batch, accumulated over three."""
    steps = config.get("accumulation_steps", 1)
    return f"batch {config['batch_size']}" + ("" if steps == 1 else f" x{steps}")


def describe_choice(name: str, choice: Choice) -> str:
    """One technique's choice in a word or two."""
    match name, choice:
        case "batch_size", _:
            return f"batch {choice}"
        case "amp", "off":
            return "fp32"
        case "amp" | "optimizer_impl" | "matmul_precision", str() if choice not in ("default", "highest"):
            return str(choice)
        case "optimizer_impl" | "matmul_precision", _:
            return f"{choice} {'optimizer' if name == 'optimizer_impl' else 'matmul'}"
        case "checkpoint_segments", 0:
            return "no checkpointing"
        case "checkpoint_segments", _:
            return f"{choice} checkpoint segment{'' if choice == 1 else 's'}"
        case "num_workers", _:
            return f"{choice} worker{'' if choice == 1 else 's'}"
        case "pin_memory", True:
            return "pinned"
        case "prefetch_factor", _:
            return f"prefetch {choice}"
        case _, bool():
            return name if choice else f"no {name}"
    return f"{name} {choice}"


def essentials(config: AnyConfig) -> dict[str, Choice]:
    """What has to be said for `autotune.prepare` to build the same config: the batch, and whatever is not off."""
    always = ("batch_size", "accumulation_steps")
    return {
        name: choice
        for name, choice in as_dict(config).items()
        if name in always or name not in REGISTRY or choice != REGISTRY[name].off
    }


def as_python(config: AnyConfig, *, prefix: str = "", width: int = 80) -> str:
    """`prefix` and the config's essentials as a dict literal, wrapped between its items."""
    literals = {
        name: json.dumps(choice) if isinstance(choice, str) else repr(choice)
        for name, choice in essentials(config).items()
    }
    items = [f'"{name}":\0{literal}' for name, literal in literals.items()]
    text = f"{prefix}{{{', '.join(items)}}}"
    lines = textwrap.wrap(
        text, width, subsequent_indent=" " * (len(prefix) + 1), break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines).replace("\0", " ")


def as_json(config: AnyConfig) -> str:
    """The config's essentials as one line of JSON, for `--config`."""
    return json.dumps(essentials(config))


def _same_batch(full: Mapping[str, Choice], reference: Mapping[str, Choice] | None) -> bool:
    names = ("batch_size", "accumulation_steps")
    return reference is not None and all(full.get(name) == reference.get(name) for name in names)
