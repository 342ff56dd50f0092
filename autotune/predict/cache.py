"""Traces kept on disk, so that searches of the same task share them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from autotune import __version__, techniques
from autotune.predict.traces import Traces
from autotune.records.config import Config

FOLDER = ".traces"  # beside the study's database


class TracingProber(Protocol):
    """What traces: `autotune.runners.local.ProcessProber`."""

    def trace(self, configs: Iterable[Config], target: str, timeout_s: float, *, known: Traces | None = None) -> Traces:
        """Trace configs; neither raises nor takes longer than `timeout_s`."""


def cached_traces(
    prober: TracingProber,
    configs: Iterable[Config],
    target: str,
    *,
    facts: Mapping[str, Any],
    folder: Path,
    timeout_s: float,
) -> Traces:
    """Traces of `configs`, as far as they can be had: those kept in `folder`, and the others traced now and added to them.

    What is kept is used only if tracing plain training gives the same once more: sizes and the optimizer may come from the
    environment or from files, which the task's hash does not cover. Failures are not kept.

    Args:
        facts: the task's, from its inspection.
        folder: is made when needed. What it holds is replaced when it is broken or of another form; a folder that
            cannot be written costs nothing but the time to trace again.
    """
    deadline = time.monotonic() + timeout_s
    configs = list(configs)
    sizes = sorted({config.batch_size for config in configs})
    path = folder / f"{_key(facts, target, sizes)}.json"
    kept = _read(path)
    traces = Traces(target=target)
    if kept is not None:
        plain_configs = [techniques.complete({"batch_size": size}) for size in sizes]
        known = Traces(target=target, lengths=kept.lengths)
        plain = prober.trace(plain_configs, target, timeout_s, known=known)
        if plain.failures:
            return plain  # what is kept may be right, and is left for a time when this can be told
        traces = kept.merged(plain) if _agrees(plain, kept) else replace(plain, lengths=None)
    traces = prober.trace(configs, target, max(0.0, deadline - time.monotonic()), known=traces)
    if kept is None or traces != replace(kept, failures=traces.failures):
        _write(path, traces)
    return traces


def _agrees(plain: Traces, kept: Traces) -> bool:
    """Whether plain training is as it was."""
    return plain.models.items() <= kept.models.items() and plain.updates.items() <= kept.updates.items()


def _key(facts: Mapping[str, Any], target: str, batch_sizes: list[int]) -> str:
    """Of everything that the traces depend on and that is known without tracing."""
    versions = [__version__, metadata.version("torch")]
    known = [facts["source_hash"], facts["num_parameters"], target, batch_sizes, *versions]
    return f"{facts['name']}-{hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16]}"


def _read(path: Path) -> Traces | None:
    try:
        return Traces.from_dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return None


def _write(path: Path, traces: Traces) -> None:
    """Replace the file in one go, so that a search that runs at the same time reads all of it or nothing."""
    content = json.dumps(replace(traces, failures={}).to_dict())
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
