"""`autotune search` against what others offer for the same question, live: run by `make bench-peers`.

On each case study, within the same memory: PyTorch Lightning's `Tuner.scale_batch_size` (both modes), Accelerate's
`find_executable_batch_size`, and `autotune search`. What each one answers is then timed by the same prober, in fresh
processes, in turns. Prints a Markdown table and the geometric means; with `--write` the README gets them in short, in a table
for these budgets and for what `ONEDNN_MAX_CPU_ISA` says, which makes the processor behave like an older one. With `--keep
FILE` what that file holds is not asked or timed again, and the rest is added, so that a comparison can be run in pieces.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, Self
from unittest import mock

from autotune.devices.cpu import processor_model
from autotune.records.config import Config, ProbeSettings, divisors
from autotune.records.outcome import Kind, Outcome
from autotune.report.figures import rate, times
from autotune.runners.jobs import InspectJob
from autotune.runners.local import LocalRunner
from autotune.task.source import TaskSource
from autotune.techniques import find_techniques
from autotune.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from tests.benchmarks.kept import Kept
from tests.benchmarks.peers_worker import TOOLS
from tests.benchmarks.searches import write

describe = find_techniques().describe
techniques = find_techniques()

ROOT = Path(__file__).parent.parent.parent
WORKER = Path(__file__).parent / "peers_worker.py"
OURS = "autotune"
PEER_TIMEOUT_S = 1200.0
TIMEOUT_S = 600.0  # of an inspection, and of each run of the prober

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
Search time: of the peers the call alone; of autotune the whole process, play-off included, within the budget that is named.
Samples/s: median of {repeats} fresh processes, the configs of a study in turns."""


@dataclass(frozen=True, eq=False)
class Study:
    """A task at a size that the memory limit binds: the global batch does not fit in fp32.

    Attributes:
        allowed: techniques that autotune leaves alone unless told otherwise.
        folder: from the root of the project, where the task's own folder is.
    """

    name: str
    memory_limit: str
    environment: Mapping[str, str] = field(default_factory=dict)
    allowed: tuple[str, ...] = ()
    folder: str = "studies"

    @property
    def label(self) -> str:
        """`gpt, 1500MiB`."""
        return f"{self.name}, {self.memory_limit}"

    @property
    def model(self) -> Path:
        """The model file."""
        return ROOT / self.folder / self.name / "model.py"


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
        is_ours: whether autotune answered.
        died: whether the tool ended without an answer of its own.
        note: what became of the answer in the prober.
    """

    tool: str
    verbatim: str
    trained: str
    config: Config | None
    wall_s: float
    is_ours: bool = False
    died: bool = False
    note: str = ""
    samples_per_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, before it was timed."""
        return asdict(replace(self, config=None)) | {"config": self.config.as_dict() if self.config else None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The answer of such data."""
        config = values["config"] and techniques.complete(values["config"])
        return cls(**{**values, "config": config})


def ask_autotune(study: Study, budget_s: float, folder: Path) -> Answer:
    """Run `autotune search` as a user does."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "search", str(study.model), "--device", "cpu", "--memory-limit", study.memory_limit,
         "--budget", f"{budget_s:g}s", "--storage", str(folder / f"{study.name} {budget_s:g}.db"), "--no-priors", "--json", "--quiet",
         *(part for name in study.allowed for part in ("--include", name))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    wall_s = time.perf_counter() - started
    if not done.stdout:
        raise SystemExit(done.stderr)
    result = json.loads(done.stdout)
    config = techniques.complete(result["config"]) if "config" in result else None
    return Answer(
        tool=f"{OURS}, {format_seconds(budget_s)}",
        verbatim=f"{result['verdict']}, {result['probes']} probes" if config else result["error"],
        trained="yes" if config else "",
        config=config,
        wall_s=wall_s,
        is_ours=True,
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
        died="raised" in end,
    )


def keeping(global_batch: int, batch_size: int) -> Config | None:
    """Plain fp32 training at the largest divisor of the global batch up to a size; None below one."""
    fitting = [divisor for divisor in divisors(global_batch) if divisor <= batch_size]
    return techniques.complete({"batch_size": fitting[-1]}, global_batch=global_batch) if fitting else None


def measure(study: Study, answers: Sequence[Answer], prober: LocalRunner, repeats: int, kept: Kept) -> None:
    """Time every answer's config in turns; an answer that runs out of memory is stepped down first."""
    limit_bytes = parse_bytes(study.memory_limit)
    settings = ProbeSettings(memory_limit_bytes=limit_bytes, interval=0.01, max_timed_s=10.0, timeout_s=TIMEOUT_S)
    speeds: dict[Config, list[float]] = {}
    order = random.Random(settings.seed)

    def speed_of(config: Config, number: int) -> float | None:
        """In samples/s; None where it ran out of memory."""
        key = f"{study.label}: {describe(config)}, run {number}"
        speed: float | None = kept.once(key, lambda: _speed(prober.probe(config, settings)))
        return speed

    for answer in answers:
        while answer.config is not None and answer.config not in speeds:
            if (speed := speed_of(answer.config, 0)) is not None:
                speeds[answer.config] = [speed]
                break
            answer.note = "out of memory at first"
            below = answer.config.batch_size - 1
            answer.config = keeping(answer.config.samples_per_step, below) if not answer.is_ours else None
    for number in range(1, repeats):
        for config in order.sample(list(speeds), len(speeds)):
            if (speed := speed_of(config, number)) is None:
                raise SystemExit(f"{describe(config)} had run, and then ran out of memory")
            speeds[config].append(speed)
    for answer in answers:
        if answer.config is not None:
            answer.samples_per_s = median(speeds[answer.config])


def _speed(outcome: Outcome) -> float | None:
    if outcome.kind is Kind.OOM:
        return None
    if outcome.measurement is None:
        raise SystemExit(f"a config ended as {outcome.kind}: {outcome.cause}")
    return outcome.measurement.samples_per_s


@contextlib.contextmanager
def prober_of(study: Study, folder: Path) -> Iterator[LocalRunner]:
    """What times a study, at its size, which everything else that runs meanwhile has as well."""
    with (
        mock.patch.dict(os.environ, study.environment),
        LocalRunner(TaskSource.of(study.model), device="cpu", logs=folder) as prober,
    ):
        yield prober


def ask_peers(study: Study, tools: Iterable[str], prober: LocalRunner, folder: Path, kept: Kept) -> list[Answer]:
    """All peers on one study."""
    global_batch = prober.stated.global_batch
    assert global_batch is not None
    limit_bytes = parse_bytes(study.memory_limit)

    def training_bytes() -> int:
        inspection = prober.run(InspectJob(memory_limit_bytes=limit_bytes, timeout_s=TIMEOUT_S))
        assert not isinstance(inspection, Outcome)
        return limit_bytes - inspection.outside_bytes

    own_bytes = kept.once(f"{study.label}: bytes for training", training_bytes)
    print(f"{study.name}: {format_bytes(own_bytes)} for training", file=sys.stderr)
    answers = []
    for tool in tools:
        found = kept.once(
            f"{study.label}: {tool}", lambda tool=tool: ask_peer(tool, study, own_bytes, global_batch, folder).to_dict()
        )
        answers.append(Answer.from_dict(found))
        print(f"  {_told(answers[-1])}", file=sys.stderr)
    return answers


def compare(study: Study, budgets_s: Iterable[float], repeats: int, tools: Iterable[str], kept: Kept) -> list[Answer]:
    """All tools on one study, autotune's answers last."""
    with tempfile.TemporaryDirectory() as name, prober_of(study, Path(name)) as prober:
        answers = ask_peers(study, tools, prober, Path(name), kept)
        for budget_s in budgets_s:
            found = kept.once(
                f"{study.label}: {OURS}, {budget_s:g} s",
                lambda budget_s=budget_s: ask_autotune(study, budget_s, Path(name)).to_dict(),
            )
            answers.append(Answer.from_dict(found))
            print(f"  {_told(answers[-1])}", file=sys.stderr)
        measure(study, answers, prober, repeats, kept)
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
                study.label,
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
    """The geometric mean over the studies of autotune's throughput over each peer's, for each of its budgets."""
    tools = next(iter(found.values()))
    lines = []
    for mine in (number for number, answer in enumerate(tools) if answer.is_ours):
        for peer in (number for number, answer in enumerate(tools) if not answer.is_ours):
            pairs = [(answers[mine].samples_per_s, answers[peer].samples_per_s) for answers in found.values()]
            ratios = [ours / theirs for ours, theirs in pairs if ours and theirs]
            missing = f" (over {len(ratios)} of {len(pairs)} studies)" if len(ratios) < len(pairs) else ""
            mean = times(geometric_mean(ratios)) if ratios else "-"
            lines.append(f"{tools[mine].tool} over {tools[peer].tool}: {mean} in the geometric mean{missing}")
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
    peers = [answer for answers in found.values() for answer in answers if not answer.is_ours]
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
    parser.add_argument("--budgets", nargs="+", type=parse_seconds, default=[300.0], help="of autotune, e.g. 45s 2m")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each answer in the prober")
    parser.add_argument("--studies", nargs="+", choices=[study.name for study in STUDIES])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--keep", type=Path, help="file of what need not be asked or timed again")
    parser.add_argument("--write", action="store_true", help="into the README")
    options = parser.parse_args()
    budgets_s, repeats = ([90.0], 2) if options.quick else (options.budgets, options.repeats)
    chosen = [study for study in STUDIES if study.name in (options.studies or (study.name,))]
    kept = Kept(options.keep)
    found = {study: compare(study, budgets_s, repeats, options.tools, kept) for study in chosen}
    versions = ", ".join(f"{package} {metadata.version(package)}" for package in ("torch", "lightning", "accelerate"))
    sizes = "; ".join(f"{s.name} {' '.join('='.join(item) for item in s.environment.items())}" for s in chosen)
    print(HOW.format(repeats=repeats))
    print(f"Versions: {versions}. Sizes: {sizes}.\n")
    print("\n".join([*table(found), "", *means(found)]))
    if options.write:
        profile = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
        like = f" with ONEDNN_MAX_CPU_ISA={profile}" if profile else ""
        how = f"{processor_model()}{like}, {versions}; medians of {repeats} fresh processes."
        name = " ".join(filter(None, ("peers", *map(format_seconds, budgets_s), profile)))
        write(name, in_short(found, how), ROOT / "README.md")


if __name__ == "__main__":
    main()
