"""`autotune search` against what others offer for the same question, live: run by `make bench-peers`.

On each case study, within the same memory: PyTorch Lightning's `Tuner.scale_batch_size` (both modes), Accelerate's
`find_executable_batch_size`, and `autotune search`. What each one answers is then timed by the same prober, in fresh
processes, in turns. Prints a Markdown table and the geometric means; with `--write` the README gets them in short.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import geometric_mean, median
from unittest import mock

from autotune.devices.cpu import processor_model
from autotune.records.config import Config, ProbeSettings, divisors
from autotune.records.outcome import Kind, Outcome
from autotune.report.figures import rate, times
from autotune.runners.jobs import InspectJob
from autotune.runners.local import LocalRunner
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from autotune.units import format_bytes, format_seconds, parse_bytes
from tests.benchmarks.peers_worker import TOOLS
from tests.benchmarks.searches import write

describe = find_techniques().describe
techniques = find_techniques()

ROOT = Path(__file__).parent.parent.parent
WORKER = Path(__file__).parent / "peers_worker.py"
OURS = "autotune"
PEER_TIMEOUT_S = 1200.0

HOW = """\
Every tool trains the study's own model, batches, loss and optimizer, each in a process of its own.
The memory limit is on a process. A peer's may hold as much more as its own libraries take: all have the same for training.
Lightning starts at 2 samples and takes 3 steps a size; Accelerate starts at 128, or at the global batch where that is less, and
takes as many.
The global batch is kept for everyone: what a peer returns becomes the next divisor of the global batch below it, or the global
batch itself where it is more, accumulated, in plain fp32; autotune is allowed to accumulate as well where it would not by itself
(`digits`: BatchNorm then normalises over smaller batches).
`trained` says whether the tool had trained the size that it returned, for two steps at least.
An answer that runs out of memory in the prober, which takes the longest samples, is replaced by the next smaller divisor.
Search time: of the peers the call alone; of autotune the whole process, play-off included, within a budget of {budget}.
Samples/s: median of {repeats} fresh processes, the configs of a study in turns."""


@dataclass(frozen=True, eq=False)
class Study:
    """A case study at a size that the memory limit binds: the global batch does not fit in fp32."""

    name: str
    memory_limit: str
    environment: Mapping[str, str] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()  # techniques that autotune leaves alone unless told otherwise

    @property
    def model(self) -> Path:
        """The model file."""
        return ROOT / "studies" / self.name / "model.py"


STUDIES = (
    Study("gpt", "1500MiB", {"GPT_LAYERS": "6", "GPT_WIDTH": "256", "GPT_GLOBAL_BATCH": "96"}),
    Study("digits", "1200MiB", {"DIGITS_WIDTH": "32", "DIGITS_GLOBAL_BATCH": "384"}, ("accumulation_steps",)),
    Study("tagger", "1500MiB", {"TAGGER_WIDTH": "192", "TAGGER_LAYERS": "4", "TAGGER_GLOBAL_BATCH": "192"}),
)


@dataclass(kw_only=True)
class Answer:
    """What a tool answered.

    Attributes:
        verbatim: what it returned, or how it ended.
        trained: whether it had trained what it returned.
        config: what the answer means with the global batch kept; None when there is none.
        wall_s: of its search.
        note: what became of the answer in the prober.
    """

    tool: str
    verbatim: str
    trained: str
    config: Config | None
    wall_s: float
    note: str = ""
    samples_per_s: float | None = None


def ask_autotune(study: Study, budget_s: float, folder: Path) -> Answer:
    """Run `autotune search` as a user does."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "search", str(study.model), "--device", "cpu", "--memory-limit", study.memory_limit,
         "--budget", f"{budget_s:g}s", "--storage", str(folder / f"{study.name}.db"), "--json", "--quiet",
         *(part for name in study.allowed for part in ("--include", name))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    wall_s = time.perf_counter() - started
    if not done.stdout:
        raise SystemExit(done.stderr)
    result = json.loads(done.stdout)
    if "config" not in result:
        return Answer(tool=OURS, verbatim=result["error"], trained="", config=None, wall_s=wall_s)
    return Answer(
        tool=OURS,
        verbatim=f"{result['verdict']}, {result['probes']} probes",
        trained="yes",
        config=techniques.complete(result["config"]),
        wall_s=wall_s,
    )


def ask_peer(tool: str, study: Study, training_bytes: int, global_batch: int, folder: Path) -> Answer:
    """Run a peer in a process of its own."""
    out = folder / f"{study.name} {tool}.jsonl"
    out.touch()
    command = [sys.executable, str(WORKER), "--tool", tool, "--model", str(study.model), "--out", str(out)]
    command += ["--training-bytes", str(training_bytes)]
    started = time.perf_counter()
    with out.with_suffix(".log").open("w") as log:
        try:
            done = subprocess.run(command, stdout=log, stderr=log, check=False, timeout=PEER_TIMEOUT_S)
            how = f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            how = f"no end within {format_seconds(PEER_TIMEOUT_S)}"
    messages = [json.loads(line) for line in out.read_text().splitlines()]
    steps = Counter(message["trained"] for message in messages if "trained" in message)
    trained = {size for size, number in steps.items() if number > 1}  # the first step makes the optimizer's state
    died = {"raised": how, "wall_s": time.perf_counter() - started}
    end = messages[-1] if messages and "wall_s" in messages[-1] else died
    returned = end.get("returned")
    size = min(returned or max(trained, default=0), global_batch)
    return Answer(
        tool=tool,
        verbatim=str(returned) if "raised" not in end else f"{end['raised']} (after {size} trained)",
        trained="yes" if size in trained else "no, a larger one" if max(trained, default=0) > size else "no",
        config=keeping(global_batch, size) if size else None,
        wall_s=end["wall_s"],
    )


def keeping(global_batch: int, batch_size: int) -> Config | None:
    """Plain fp32 training at the largest divisor of the global batch up to a size; None below one."""
    fitting = [divisor for divisor in divisors(global_batch) if divisor <= batch_size]
    return techniques.complete({"batch_size": fitting[-1]}, global_batch=global_batch) if fitting else None


def measure(answers: Sequence[Answer], prober: LocalRunner, settings: ProbeSettings, repeats: int) -> None:
    """Time every answer's config in turns; an answer that runs out of memory is stepped down first."""
    speeds: dict[Config, list[float]] = {}
    order = random.Random(settings.seed)
    for answer in answers:
        while answer.config is not None and answer.config not in speeds:
            outcome = prober.probe(answer.config, settings)
            if outcome.kind is not Kind.OOM:
                speeds[answer.config] = [_speed(outcome)]
                break
            answer.note = "out of memory at first"
            below = answer.config.batch_size - 1
            answer.config = keeping(answer.config.samples_per_step, below) if answer.tool != OURS else None
    for _ in range(repeats - 1):
        for config in order.sample(list(speeds), len(speeds)):
            speeds[config].append(_speed(prober.probe(config, settings)))
    for answer in answers:
        if answer.config is not None:
            answer.samples_per_s = median(speeds[answer.config])


def _speed(outcome: Outcome) -> float:
    if outcome.measurement is None:
        raise SystemExit(f"a config that had run ended as {outcome.kind}: {outcome.cause}")
    return outcome.measurement.samples_per_s


def compare(study: Study, budget_s: float, repeats: int, tools: Iterable[str]) -> list[Answer]:
    """All tools on one study."""
    limit_bytes = parse_bytes(study.memory_limit)
    settings = ProbeSettings(memory_limit_bytes=limit_bytes, interval=0.01, max_timed_s=10.0, timeout_s=600.0)
    with tempfile.TemporaryDirectory() as name, mock.patch.dict(os.environ, study.environment):
        folder = Path(name)
        with LocalRunner(TaskSource.of(study.model), device="cpu", logs=folder) as prober:
            global_batch = prober.stated.global_batch
            inspection = prober.run(InspectJob(memory_limit_bytes=limit_bytes, timeout_s=settings.timeout_s))
            assert global_batch is not None and not isinstance(inspection, Outcome)
            training_bytes = limit_bytes - inspection.outside_bytes
            print(f"{study.name}: {format_bytes(training_bytes)} for training", file=sys.stderr)
            answers = []
            for tool in tools:
                answers.append(ask_peer(tool, study, training_bytes, global_batch, folder))
                print(f"  {_told(answers[-1])}", file=sys.stderr)
            answers.append(ask_autotune(study, budget_s, folder))
            print(f"  {_told(answers[-1])}", file=sys.stderr)
            measure(answers, prober, settings, repeats)
    return answers


def _told(answer: Answer) -> str:
    return f"{answer.tool}: {answer.verbatim} in {format_seconds(answer.wall_s)}"


def table(found: Mapping[Study, Sequence[Answer]]) -> list[str]:
    """A Markdown table: a row an answer."""
    lines = [
        "| study, limit | tool | returned | trained | config | samples/s | of autotune's | search |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for study, answers in found.items():
        ours = answers[-1].samples_per_s
        for answer in answers:
            speed = answer.samples_per_s
            cells = (
                f"{study.name}, {study.memory_limit}",
                answer.tool,
                answer.verbatim.replace("|", "/"),
                answer.trained,
                (describe(answer.config) if answer.config else "none") + (f" ({answer.note})" if answer.note else ""),
                rate(speed) if speed else "-",
                times(speed / ours if speed and ours else None),
                format_seconds(answer.wall_s),
            )
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def means(found: Mapping[Study, Sequence[Answer]]) -> list[str]:
    """The geometric mean over the studies of autotune's throughput over each peer's."""
    lines = []
    for index, tool in enumerate(answer.tool for answer in next(iter(found.values()))[:-1]):
        pairs = [(answers[-1].samples_per_s, answers[index].samples_per_s) for answers in found.values()]
        ratios = [ours / theirs for ours, theirs in pairs if ours and theirs]
        missing = f" (over {len(ratios)} of {len(pairs)} studies)" if len(ratios) < len(pairs) else ""
        mean = times(geometric_mean(ratios)) if ratios else "-"
        lines.append(f"autotune over {tool}: {mean} in the geometric mean{missing}")
    return lines


def in_short(found: Mapping[Study, Sequence[Answer]], how: str) -> list[str]:
    """What the README tells of a comparison: throughput and search time of each answer, and which had not been trained.

    Args:
        how: on what machine, with which versions.
    """
    tools = [answer.tool for answer in next(iter(found.values()))]
    lines = [f"| study, limit | {' | '.join(tools)} |", "|---|" + "---|" * len(tools)]
    for study, answers in found.items():
        cells = (f"{rate(a.samples_per_s)} in {format_seconds(a.wall_s)}" if a.samples_per_s else "-" for a in answers)
        lines.append(f"| `{study.name}`, {study.memory_limit} | {' | '.join(cells)} |")
    peers = [answer for answers in found.values() for answer in answers if answer.tool != OURS]
    unsafe = sum(answer.trained != "yes" or bool(answer.note) for answer in peers)
    untrained = f"{unsafe} of the {len(peers)} answers of the other tools had not been trained at that size, or ran out of memory."
    return [
        *lines,
        "",
        f"Samples/s, and the time of the search. {how} {untrained}",
        "",
        *(f"- {line}" for line in means(found)),
    ]


def main() -> None:
    """Compare, print, and write into the README."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a short budget and few repeats: does it work?")
    parser.add_argument("--studies", nargs="+", choices=[study.name for study in STUDIES])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--write", action="store_true", help="into the README")
    options = parser.parse_args()
    budget_s, repeats = (90.0, 2) if options.quick else (300.0, 5)
    chosen = [study for study in STUDIES if study.name in (options.studies or (study.name,))]
    found = {study: compare(study, budget_s, repeats, options.tools) for study in chosen}
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in ("torch", "lightning", "accelerate"))
    sizes = "; ".join(f"{s.name} {' '.join('='.join(item) for item in s.environment.items())}" for s in chosen)
    print(HOW.format(budget=format_seconds(budget_s), repeats=repeats))
    print(f"Versions: {versions}. Sizes: {sizes}.\n")
    print("\n".join([*table(found), "", *means(found)]))
    if options.write:
        took = f"within {format_seconds(budget_s)} for autotune; medians of {repeats} fresh processes"
        write("peers", in_short(found, f"{processor_model()}, {versions}; {took}."), ROOT / "README.md")


if __name__ == "__main__":
    main()
