"""`python -m tests.driver [--card NAME] COMMAND...` runs a command over the played driver.

The command has to use this Python, whose torch has to be the CUDA build. It ends with the command's exit code; a signal to
end is passed on.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys

from tests.driver.build import BuildError
from tests.driver.cards import CARDS, environment
from tests.driver.run import libraries, played_state


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.driver", description="Run a command over the played driver.")
    parser.add_argument("--card", choices=CARDS, help="default: what the environment says, or an A100")
    parser.add_argument("--cards", type=int, default=1, metavar="N", help="how many of it")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND...")
    arguments = parser.parse_args()
    if not arguments.command:
        parser.error("a command is needed: python -m tests.driver python -m pytest tests/gpu")
    try:
        played = libraries()
    except BuildError as error:
        parser.exit(2, f"{error}\n")
    if arguments.card:
        played |= environment(CARDS[arguments.card], arguments.cards)
    with played_state() as state:
        return _run(arguments.command, {**os.environ, **played, "PLAYED_STATE": str(state)})


def _run(command: list[str], variables: dict[str, str]) -> int:
    process = subprocess.Popen(command, env=variables)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: process.send_signal(received))
    code = process.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
