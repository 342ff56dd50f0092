"""Whether the gain that a search tells is the gain that a user then sees, live: run by `make bench-told`.

For each of twelve tasks: a search of 60 s, then `autotune verify --against` several times, which runs the answer and the baseline in
turns in fresh processes, for two minutes in all. On one thread, alone on the machine. Prints a Markdown table, how many intervals hold
what was seen, the bias, and the share of gains that were told more than 5 % too high; with `--write` it goes into `studies/README.md`.

The tasks of `unseen` and the variants set no constant of the package.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median

from autotune.records.recheck import Recheck
from autotune.report.figures import times
from tests.benchmarks.kept import Kept
from tests.benchmarks.live import Case, ask
from tests.benchmarks.searches import write

BUDGET = "60s"
CHECKED = 4  # `verify --against` of each answer: four processes each
RUN_S = 8.0  # that each process is to train for
TOO_HIGH = (1.05, 1.10)

HOW = f"""\
A search of {BUDGET} on one thread, then the answer and the baseline {2 * CHECKED} times each in turns, in fresh processes of about \
{RUN_S:.0f} s. Told: the speed-up and its 95 % interval, as the search printed them. Seen: the geometric mean of the later runs. \
An answer that is not told as faster is no promise: it counts for the intervals and the bias, and not for what was told too high."""


CASES = (
    *(
        Case(name, f"tests/benchmarks/unseen/{name}/model.py")
        for name in ("cell_vae", "click_cross", "demand_lstm", "scan_unet", "speech_ctc", "tile_resnet")
    ),
    *(Case(name, f"studies/{name}/model.py") for name in ("gpt", "digits", "tagger")),
    Case("gpt, vocabulary of 8192", "studies/gpt/model.py", {"GPT_VOCABULARY": "8192"}),
    Case("digits, narrow", "studies/digits/model.py", {"DIGITS_WIDTH": "8"}),
    Case("tagger, narrow", "studies/tagger/model.py", {"TAGGER_WIDTH": "32"}),
)


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a search told of a gain, and what was then seen of it."""

    name: str
    verdict: str
    told: float
    low: float
    high: float
    seen: tuple[float, ...]

    @property
    def gain(self) -> float:
        """The gain as it was seen: the geometric mean."""
        return math.exp(fmean(map(math.log, self.seen)))

    @property
    def held(self) -> bool:
        """Whether the interval that was told holds what was seen."""
        return self.low <= self.gain <= self.high


def tell_and_see(case: Case, folder: Path) -> Told | str:
    """Search, then run the answer and the baseline again; the reason where there is no gain to see again."""
    study = folder / f"{case.name}.db"
    study.unlink(missing_ok=True)  # of a run that was stopped
    answer = ask(case, "search", "--device", "cpu", "--budget", BUDGET, "--storage", str(study), "--quiet")
    if not answer.get("speedup_ci"):
        return str(answer.get("error") or answer["verdict"])
    global_batch = answer["config"]["batch_size"] * answer["config"]["accumulation_steps"]  # type: ignore[index]
    steps = max(10, round(RUN_S * float(answer["samples_per_s"]) / global_batch))  # type: ignore[arg-type]
    seen = []
    for _ in range(CHECKED):
        found = ask(case, "verify", "--against", str(study), "--steps", str(steps), "--max-regression", "90%")
        if "recheck" in found:
            seen.append(Recheck.from_dict(found["recheck"]).speedup)  # type: ignore[arg-type]
    if not seen:
        return "other work disturbed every later run"
    low, high = answer["speedup_ci"]  # type: ignore[misc]
    return Told(
        name=case.name,
        verdict=str(answer["verdict"]),
        told=float(answer["speedup"]),
        low=low,
        high=high,
        seen=tuple(seen),
    )


def table(found: Sequence[Told], without: Mapping[str, str]) -> Iterator[str]:
    """The table and the figures below it."""
    yield from (
        HOW,
        "",
        "| task | verdict | told | interval | seen | seen / told | held |",
        "|---|---|---|---|---|---|---|",
    )
    for one in found:
        held = "yes" if one.held else "no"
        interval = f"{one.low:.2f} to {one.high:.2f}"
        figures = f"{times(one.told)} | {interval} | {times(one.gain)} | {one.gain / one.told:.3f}"
        yield f"| {one.name} | {one.verdict} | {figures} | {held} |"
    for name, why in without.items():
        yield f"| {name} | {why} | - | - | - | - | - |"
    if not found:
        return
    ratios = [one.told / one.gain for one in found]
    promised = [one.told / one.gain for one in found if one.verdict == "faster"]
    above = (f"{sum(ratio > bar for ratio in promised)} by more than {bar - 1:.0%}" for bar in TOO_HIGH)
    yield ""
    yield (
        f"Held: {sum(one.held for one in found)} of {len(found)}. Bias (median of told / seen): {median(ratios) - 1:+.1%}. "
        f"Of {len(promised)} that were told as faster, told too high: {', '.join(above)}; "
        f"the highest by {max(promised, default=1.0) - 1:+.1%}."
    )


def run(cases: Iterable[Case], folder: Path, kept: Kept) -> tuple[list[Told], dict[str, str]]:
    """Every case in turn."""
    found, without = [], {}
    for case in cases:
        told = kept.once(case.name, lambda case=case: _plain(tell_and_see(case, folder)))
        if isinstance(told, str):
            without[case.name] = told
            print(f"{case.name}: {told}", file=sys.stderr)
        else:
            found.append(one := Told(**{**told, "seen": tuple(told["seen"])}))
            print(
                f"{one.name}: told {one.told:.3f} ({one.low:.3f} to {one.high:.3f}), seen {one.seen}", file=sys.stderr
            )
    return found, without


def _plain(told: Told | str) -> dict[str, object] | str:
    return told if isinstance(told, str) else asdict(told)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES], help="names of tasks")
    parser.add_argument("--models", nargs="+", type=Path, help="model files to take instead")
    parser.add_argument("--keep", type=Path, help="folder for studies; what it holds is not searched again")
    parser.add_argument("--write", action="store_true", help="write the table into studies/README.md")
    options = parser.parse_args()
    cases = [case for case in CASES if case.name in options.cases]
    if options.models:
        if options.write:
            parser.error("--write is for the twelve tasks, and not for --models")
        paths = [path.resolve() for path in options.models]
        cases = [Case(f"{path.parent.name}, {path.stem}", str(path)) for path in paths]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        lines = list(table(*run(cases, folder, Kept(folder / "found.jsonl"))))
    print("\n".join(lines))
    if options.write:
        write("told", lines)


if __name__ == "__main__":
    main()
