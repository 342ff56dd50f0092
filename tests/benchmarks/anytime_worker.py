"""One search in a process of its own, which prints when it knew what, a JSON object a line. Started by `anytime.py`.

It begins as `autotune search` does, with the same parser and the process that imports torch started ahead, and imports nothing of the
benchmark, since the time that this takes counts.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from autotune.cli.parser import build_parser
from autotune.runners.start import started_ahead


def search(options: argparse.Namespace) -> None:
    """Search, and print what begins, what each probe measured, and the answer so far after it."""
    from autotune import api
    from autotune.tuning.events import Event, Listener, ProbeEnded, ProbeStarted, SearchEnded, Working

    def told(**values: Any) -> None:
        print(json.dumps({"elapsed_s": time.monotonic() - options.began, **values}), flush=True)

    class Told(Listener):
        def on(self, event: Event) -> None:
            match event:
                case Working():
                    told(begins=event.purpose)
                case ProbeStarted():
                    told(begins="probe")
                case ProbeEnded(trial=trial, best=best):
                    measured = trial.outcome.measurement
                    told(
                        config=trial.config.as_dict(),
                        samples_per_s=measured.samples_per_s if measured else None,
                        best=best[0].as_dict() if best else None,
                        chance=event.chance,
                    )
                case SearchEnded(result=result):
                    told(answer=result.config, verdict=result.verdict)

    api.search(
        options.model,
        device="cpu",
        budget=options.budget,
        memory_limit=options.memory_limit,
        include=options.include,
        storage=options.storage,
        no_priors=True,
        listeners=[Told()],
        began_s=options.began,
    )


def main() -> None:
    """Search."""
    build_parser()  # as the command does first
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--began", type=float, required=True, help="what time.monotonic() read when it was started")
    parser.add_argument("--budget", required=True)
    parser.add_argument("--memory-limit", required=True)
    parser.add_argument("--include", nargs="*", default=[])
    parser.add_argument("--storage", required=True)
    options = parser.parse_args()
    with started_ahead():
        search(options)


if __name__ == "__main__":
    main()
