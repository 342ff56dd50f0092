"""What whole searches find on cards of several sizes that the tests play, and what their books say of the configs on the front.

    python -m tests.benchmarks.cards [--cards NAME...] [--models NAME...] [--budget 60s] [--large]     with torch's CUDA build

With `--large` the models are so large that the baseline fits on some of the cards alone, and barely there. Kernels compute nothing
there and take a made-up time, so no speed is shown: how each search ended, how many probes ran out of memory, and how far the memory
that it tells for the front lies from what the driver had booked for that process at its peak.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.units import GIB, MIB
from tests.driver.cards import A100, H100_SLICE, LAPTOP, RTX_4090, T4
from tests.driver.played import Played
from tests.driver.run import open_books, variables

ROOT = Path(__file__).parent.parent.parent
CARDS = {
    "A100 40 GB": A100,
    "T4": T4,
    "RTX 4090": RTX_4090,
    "H100 slice of 10 GB": H100_SLICE,
    "laptop of 8 GiB, 3 GiB taken": replace(LAPTOP, neighbour_bytes=3 * GIB),
}
MODELS = {name: ROOT / "studies" / name / "model.py" for name in ("gpt", "digits", "tagger")} | {
    "GPT-2 of Hugging Face": ROOT / "tests" / "models" / "gpt2.py"
}
CUT = ("--include", "accumulation_steps")  # all gradients are zero there, which do not show whether a batch may be cut
LARGE = {
    "GPT_LAYERS": "12",
    "GPT_WIDTH": "768",
    "GPT_HEADS": "12",
    "GPT_CONTEXT": "1024",
    "GPT_VOCABULARY": "50257",
    "GPT_GLOBAL_BATCH": "32",
    "DIGITS_WIDTH": "64",
    "DIGITS_DEPTH": "4",
    "DIGITS_PIXELS": "64",
    "DIGITS_GLOBAL_BATCH": "384",
    "TAGGER_LAYERS": "6",
    "TAGGER_WIDTH": "768",
    "TAGGER_HEADS": "12",
    "TAGGER_GLOBAL_BATCH": "512",
    "GPT2_GLOBAL_BATCH": "64",
}
LOOK_EVERY_S = 0.002


def run(command: list[str], environment: Mapping[str, str], folder: Path) -> tuple[int, dict[str, Any]]:
    """The exit code of a command of `autotune`, and its JSON document."""
    ended = subprocess.run(
        [sys.executable, "-m", "autotune", *command, "--device", "cuda", "--json"],
        env={**environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, json.loads(ended.stdout)


def booked_bytes(
    model: Path, config: Mapping[str, Any], environment: Mapping[str, str], folder: Path
) -> tuple[int, int]:
    """What a probe of a config tells as its peak, and the most that the books showed for its process, which comes last.

    The inspection runs before it in a process of its own, and may take more than a config that saves memory.
    """
    played = Played(Path(environment["PLAYED_STATE"]))
    command = [
        sys.executable,
        "-m",
        "autotune",
        "probe",
        str(model),
        "--config",
        json.dumps({**config}),
        "--device",
        "cuda",
        "--json",
    ]
    most: dict[int, int] = {}  # by process, in the order of their coming
    with subprocess.Popen(
        command, env={**environment}, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as probe:
        while probe.poll() is None:
            for pid, held_bytes in played.processes().items():
                most[pid] = max(most.get(pid, 0), held_bytes)
            time.sleep(LOOK_EVERY_S)
        assert probe.stdout is not None
        told = json.loads(probe.stdout.read())
    return int(told["measurement"]["peak_bytes"]), [*most.values()][-1]


def rows(cards: list[str], models: list[str], budget: str, sizes: Mapping[str, str]) -> Iterator[str]:
    """A row of the table for each search, over models of these sizes."""
    for card in cards:
        for model in models:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                environment = variables(folder / "books", CARDS[card]) | {**sizes}
                books = open_books(environment)
                code, found = run(["search", str(MODELS[model]), "--budget", budget, *CUT], environment, folder)
                left = books.processes()
                if "error" in found:
                    yield f"| {card} | {model} | {code} | {found['error'][:300]} | | | {len(left)} |"
                    continue
                apart, configs = [], {json.dumps(one["config"]): one["config"] for one in found["front"]}
                for config in list(configs.values())[:: max(1, len(configs) // 3)]:
                    peak, booked = booked_bytes(MODELS[model], config, environment, folder)
                    apart.append((peak - booked) / MIB)
                outcomes = ", ".join(f"{number} {kind}" for kind, number in found["outcomes"].items())
                within = f"{min(apart):+.0f} to {max(apart):+.0f}" if apart else ""
                yield f"| {card} | {model} | {code} | {found['verdict']} | {outcomes} | {within} | {len(left)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=[*CARDS])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--large", action="store_true")
    asked = parser.parse_args()
    print("| card | model | exit code | verdict | probes | front: told less booked, MiB | processes left |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for row in rows(asked.cards, asked.models, asked.budget, LARGE if asked.large else {}):
        print(row, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
