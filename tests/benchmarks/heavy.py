"""Whether a short search decides about a heavy model, live: run by `make bench-heavy`.

Twelve searches of 45 s on one thread, whose optimizer steps take 1 to 3 s: the case studies at a larger size, and the tasks of
`unseen` with a larger global batch. A search has decided where it says `faster`, `slower` or `same`. A gain that was told is then
seen again by `autotune verify --against`, in four fresh processes: it was wrong where the answer is the slower one. Prints a Markdown
table; with `--write` it goes into `studies/README.md`.

The tasks of `unseen` set no constant of the package.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from autotune.records.recheck import Recheck
from autotune.report.figures import times
from tests.benchmarks.live import Case, ask
from tests.benchmarks.searches import write

BUDGET = "45s"
CHECKED_STEPS = 3  # of each process that sees a gain again
WRONG = 0.99  # of the baseline's speed, below which an answer that was told as faster is wrong

HOW = f"A search of {BUDGET} on one thread; then the answer and the baseline twice each in turns, in fresh processes."


def _unseen(name: str, global_batch: int) -> Case:
    model = f"tests/benchmarks/unseen/{name}/model.py"
    return Case(f"{name}, global batch of {global_batch}", model, arguments=("--global-batch", str(global_batch)))


def _study(name: str, size: str, **environment: int) -> Case:
    values = {f"{name.upper()}_{key.upper()}": str(value) for key, value in environment.items()}
    return Case(f"{name}, {size}", f"studies/{name}/model.py", values)


CASES = (
    _study("gpt", "wide", width=256),
    _study("gpt", "vocabulary of 8192", vocabulary=8192),
    _study("gpt", "long", context=1024, global_batch=12),
    _study("digits", "wide", width=32),
    _study("digits", "large images", pixels=64, global_batch=96),
    _study("tagger", "wide", width=256, layers=4),
    _unseen("cell_vae", 8192),
    _unseen("click_cross", 32768),
    _unseen("demand_lstm", 2048),
    _unseen("scan_unet", 64),
    _unseen("speech_ctc", 256),
    _unseen("tile_resnet", 192),
)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search told, and what was then seen of it.

    Attributes:
        step_s: of the baseline.
        speedup: with its interval; None where no gain was told.
        seen: the speed-up in later processes; None where none was told or other work disturbed them.
        why: why it is undecided.
    """

    name: str
    verdict: str
    step_s: float
    probes: int
    rounds: int
    wall_s: float
    speedup: tuple[float, float, float] | None
    seen: float | None
    why: str

    @property
    def is_decided(self) -> bool:
        """Whether the user knows what to do."""
        return self.verdict != "undecided"

    @property
    def is_wrong(self) -> bool:
        """Whether it told a gain that is a loss."""
        return self.verdict == "faster" and self.seen is not None and self.seen < WRONG


def decide(case: Case, folder: Path, *, is_checked: bool) -> Found:
    """Search; then see a gain again."""
    study, log = folder / f"{case.name}.db", folder / f"{case.name}.log"
    options = ("--device", "cpu", "--budget", BUDGET, "--storage", str(study), "--no-priors")
    answer = ask(case, "search", *options, log=log)
    (folder / f"{case.name}.json").write_text(json.dumps(answer, indent=1))
    baseline: Mapping[str, float] = answer.get("baseline") or {}  # type: ignore[assignment]
    speedup, interval = answer.get("speedup"), answer.get("speedup_ci")
    seen = None
    if is_checked and answer["verdict"] == "faster":
        steps = ("--steps", str(CHECKED_STEPS), "--max-regression", "90%")
        found = ask(case, "verify", "--against", str(study), *steps, log=log)
        if "recheck" in found:
            seen = Recheck.from_dict(found["recheck"]).speedup  # type: ignore[arg-type]
    return Found(
        name=case.name,
        verdict=str(answer["verdict"]),
        step_s=baseline.get("step_s", 0.0),
        probes=int(answer["probes"]),  # type: ignore[call-overload]
        rounds=int(answer.get("num_rounds") or 0),  # type: ignore[call-overload]
        wall_s=float(answer["wall_s"]),  # type: ignore[arg-type]
        speedup=(speedup, *interval) if speedup and interval else None,  # type: ignore[arg-type, misc]
        seen=seen,
        why=str(answer.get("undecided") or ""),
    )


def table(found: Sequence[Found]) -> Iterator[str]:
    """The table and the figures below it."""
    yield from (
        HOW,
        "",
        "| task | step of the baseline | probes | told | interval | seen |",
        "|---|---|---|---|---|---|",
    )
    for one in found:
        told, interval = one.verdict, "-"
        if one.speedup is not None:
            ratio, low, high = one.speedup
            told, interval = f"{one.verdict}, {times(ratio)}", f"{low:.2f} to {high:.2f}"
        seen = times(one.seen) if one.seen is not None else "-"
        yield f"| {one.name} | {one.step_s:.2g} s | {one.probes} | {told} | {interval} | {seen} |"
    yield ""
    yield f"Decided: {sum(one.is_decided for one in found)} of {len(found)}; wrongly: {sum(one.is_wrong for one in found)}."


def run(cases: Iterable[Case], folder: Path, *, is_checked: bool) -> Iterator[Found]:
    """Every case in turn."""
    for case in cases:
        found = decide(case, folder, is_checked=is_checked)
        print(found, file=sys.stderr)
        yield found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES], help="names of tasks")
    parser.add_argument("--unchecked", action="store_true", help="do not see the gains again")
    parser.add_argument("--keep", type=Path, help="folder for studies and logs; what it holds is not searched again")
    parser.add_argument("--write", action="store_true", help="write the table into studies/README.md")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        done = folder / "found.json"
        known = {one["name"]: Found(**one) for one in (json.loads(done.read_text()) if done.exists() else [])}
        cases = [case for case in CASES if case.name in options.cases and case.name not in known]
        for found in run(cases, folder, is_checked=not options.unchecked):
            known[found.name] = found
            done.write_text(json.dumps([asdict(one) for one in known.values()]))
    lines = list(table([known[case.name] for case in CASES if case.name in known]))
    print("\n".join(lines))
    if options.write:
        write("heavy", lines)


if __name__ == "__main__":
    main()
