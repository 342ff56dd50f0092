"""One search in a process of its own, which prints when it knew what, a JSON object a line. Started by `anytime.py`.

It imports what `autotune search` imports and nothing of the benchmark, since the time that this takes counts.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from autotune import api
from autotune.tuning.events import Event, Listener, ProbeEnded, ProbeStarted, SearchEnded, Working


class Told(Listener):
    """Prints what begins, what each probe measured, and the answer so far after it."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s

    def on(self, event: Event) -> None:
        match event:
            case Working():
                self._print(begins=event.purpose)
            case ProbeStarted():
                self._print(begins="probe")
            case ProbeEnded(trial=trial, best=best):
                measured = trial.outcome.measurement
                self._print(
                    config=trial.config.as_dict(),
                    samples_per_s=measured.samples_per_s if measured else None,
                    best=best[0].as_dict() if best else None,
                    chance=event.chance,
                )
            case SearchEnded(result=result):
                self._print(answer=result.config, verdict=result.verdict)

    def _print(self, **values: Any) -> None:
        print(json.dumps({"elapsed_s": time.monotonic() - self._began_s, **values}), flush=True)


def main() -> None:
    """Search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--began", type=float, required=True, help="what time.monotonic() read when it was started")
    parser.add_argument("--budget", required=True)
    parser.add_argument("--memory-limit", required=True)
    parser.add_argument("--include", nargs="*", default=[])
    parser.add_argument("--storage", required=True)
    options = parser.parse_args()
    api.search(
        options.model,
        device="cpu",
        budget=options.budget,
        memory_limit=options.memory_limit,
        include=options.include,
        storage=options.storage,
        no_priors=True,
        listeners=[Told(options.began)],
        began_s=options.began,
    )


if __name__ == "__main__":
    main()
