"""Searches in processes of their own that share a study: over a closed form, so that a whole search takes seconds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WAIT_S = 100

CODE = """
import json, sys, time
from dataclasses import replace

asked = json.loads(sys.argv[1])
from autotune.records.options import SearchOptions
from autotune.study import place, store
from autotune.study.backends.postgres import Postgres
from autotune.tuning import playoff
from autotune.tuning.events import Listener, Note, ProbeStarted, SearchStarted
from autotune.tuning.search import search
from tests.closed_form import ClosedFormRunner

Postgres.beat_s, Postgres.gone_after_s = asked["beat_s"], asked["gone_after_s"]
if asked["elsewhere"]:  # on a machine of its own, as far as the others can see
    here = place.this_process
    alone = lambda: replace(here(), host=f"machine {asked['seed']}")
    place.this_process = store.this_process = alone
now_s = time.time
time.time = lambda: now_s() + asked["ahead_s"]
playoff.MAX_ROUNDS = playoff.MIN_ROUNDS

def wait():
    print(json.dumps({"begins": True}), flush=True)
    sys.stdin.readline()

class Tells(Listener):
    def on(self, event):
        match event:
            case SearchStarted() if asked["waits"] == "opened":
                wait()
            case ProbeStarted():
                print(json.dumps({"started": event.number, "stage": event.stage}), flush=True)
            case Note():
                print(json.dumps({"note": event.text}), flush=True)

runner = ClosedFormRunner(noise=0.01, seed=asked["seed"], seconds=asked["seconds"])
options = SearchOptions(storage=asked["storage"], sampler=asked["sampler"], seed=asked["seed"], budget_s=asked["budget_s"],
                        num_trials=asked["num_trials"])
if asked["waits"] is True:
    wait()
result = search(None, options, runner=runner, listener=Tells())
print(json.dumps({"result": result.to_dict(), "configs": len(runner.configs)}), flush=True)
"""

USUAL = {
    "seconds": 0.05,
    "sampler": "cost-model",
    "seed": 0,
    "budget_s": 60.0,
    "num_trials": 20,
    "beat_s": 1,
    "gone_after_s": 3,
    "waits": False,
    "ahead_s": 0.0,
    "elsewhere": False,
}


class Controller:
    """A search in a process of its own."""

    def __init__(self, storage: str, environment: Mapping[str, str], **asked: Any) -> None:
        told = json.dumps({"storage": storage, **USUAL, **asked})
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", CODE, told],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
        )
        self.lines: list[dict[str, Any]] = []

    def go(self) -> None:
        """Let one that waits begin."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def until(self, key: str, **values: Any) -> dict[str, Any]:
        """The next line that has this key and these values."""
        assert self.process.stdout is not None and self.process.stderr is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))
            if key in self.lines[-1] and values.items() <= self.lines[-1].items():
                return self.lines[-1]
        raise AssertionError(f"it has ended:\n{self.process.stderr.read()}")

    def result(self) -> dict[str, Any]:
        """The answer of its search, once it has ended."""
        found: dict[str, Any] = self.until("result")["result"]
        self.process.wait(WAIT_S)
        return found

    def kill(self) -> None:
        """End it as the kernel does."""
        self.process.kill()
        self.process.wait()

    def notes(self) -> list[str]:
        return [line["note"] for line in self.lines if "note" in line]


@contextlib.contextmanager
def controllers(
    number: int, storage: str, environment: Sequence[Mapping[str, str]] = (), **asked: Any
) -> Iterator[list[Controller]]:
    """So many searches of one study, with seeds of their own. None is left afterwards.

    Args:
        environment: variables of each; nothing for none.
        asked: as in `USUAL`; a list holds the value for each. `waits` says whether one waits for `go` before it opens the study, or,
            where that is "opened", before its first probe.
    """
    found = []
    for seed in range(number):
        own = {name: value[seed] if isinstance(value, list) else value for name, value in asked.items()}
        found.append(Controller(storage, environment[seed] if environment else {}, **{"seed": seed, **own}))
    try:
        yield found
    finally:
        for one in found:
            one.process.kill()
            one.process.communicate()
