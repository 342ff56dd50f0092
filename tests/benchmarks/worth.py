"""What each technique is worth on the studies, alone: run by `make bench-worth`.

Each is probed beside the study's baseline, in fresh processes in turn, on one thread. A technique stands where it can be of use: one
that needs a GPU is not here, and one that saves the memory of what a study hardly has (logits, say) stands with the study that has it.
With `--write` the table goes into `studies/README.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from autotune.task.loading import load_task
from autotune.techniques import find_techniques
from tests.benchmarks.searches import write

complete = find_techniques().complete

STUDIES = Path(__file__).parent.parent.parent / "studies"
Choices = Mapping[str, Any]
TRIED: Mapping[str, tuple[Choices, ...]] = {
    "gpt": (
        {"batch_size": 48},
        {"batch_size": 2},
        {"amp": "bf16"},
        {"amp": "fp16"},
        {"attention": "math"},
        {"checkpoint_segments": 4},
        {"checkpoint_segments": 4, "checkpoint_policy": "selective"},
        {"param_dtype": "bf16"},
        {"optimizer_impl": "foreach"},
        {"optimizer_impl": "fused"},
        {"batch_size": 48, "optimizer_in_backward": True},
    ),
    "gpt with a vocabulary of 8192": ({"loss_chunks": True},),
    "digits": (
        {"amp": "bf16"},
        {"channels_last": True},
        {"amp": "bf16", "channels_last": True},
        {"checkpoint_segments": 6},
        {"inplace_activations": True},
        {"optimizer_impl": "fused"},
    ),
    "tagger": (
        {"amp": "bf16"},
        {"length_bucketing": True},
        {"num_workers": 1, "persistent_workers": True},
        {"optimizer_impl": "fused"},
    ),
}
ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {"gpt with a vocabulary of 8192": {"GPT_VOCABULARY": "8192"}}


def model_of(study: str) -> Path:
    """The model file of a study, or of a study at another size."""
    return STUDIES / study.split()[0] / "model.py"


def probe(study: str, choices: Choices) -> dict[str, Any]:
    """Run one config in a process of its own; without a measurement it is the outcome's message."""
    command = [sys.executable, "-m", "autotune", "probe", str(model_of(study)), "--json"]
    environment = {**os.environ, **ENVIRONMENTS.get(study, {}), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--config", json.dumps(choices)], env=environment, capture_output=True, text=True)
    outcome = json.loads(done.stdout) if done.stdout else {"kind": "error", "error": done.stderr.strip()}
    return {"message": outcome.get("error") or outcome["kind"], **(outcome.get("measurement") or {})}


def table(rounds: int, studies: Iterable[str]) -> list[str]:
    """Medians of the rounds, each relative to the study's baseline in the same rounds."""
    lines = ["| study | change | speed | peak memory |", "|---|---|---|---|"]
    for study in studies:
        changes = TRIED[study]
        task = load_task(model_of(study))
        entrants: list[dict[str, Any]] = [{**(task.baseline or {}), **change} for change in ({}, *changes)]
        found = [[probe(study, entrant) for entrant in entrants] for _ in range(rounds)]
        for number, entrant in enumerate(entrants[1:], start=1):
            named = find_techniques().describe(
                *(complete(one, global_batch=task.global_batch) for one in (entrant, entrants[0]))
            )
            pairs = [(turn[number], turn[0]) for turn in found if "samples_per_s" in turn[number]]
            if not pairs:
                lines.append(f"| {study} | {named} | {found[0][number]['message']} | |")
                continue
            speed, memory = (
                median(one[key] / plain[key] for one, plain in pairs) for key in ("samples_per_s", "peak_bytes")
            )
            lines.append(f"| {study} | {named} | {speed:.2f}x | {memory:.2f}x |")
            print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main() -> None:
    """Probe, print, and write into the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--studies", nargs="+", default=list(TRIED), choices=list(TRIED))
    parser.add_argument("--write", action="store_true", help="into the studies' README")
    options = parser.parse_args()
    lines = table(options.rounds, options.studies)
    print("\n".join(lines))
    if options.write:
        write("worth", lines)


if __name__ == "__main__":
    main()
