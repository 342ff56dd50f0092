"""Run a command and turn what it raises into an exit code."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from autotune.cli.parser import build_parser
from autotune.errors import AutotuneError

ANSWERED, NOTHING_FEASIBLE, USAGE, INTERRUPTED = 0, 1, 2, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code; usage errors exit with 2 from within argparse."""
    options = build_parser().parse_args(arguments)
    from autotune.cli import commands

    try:
        return commands.COMMANDS[options.command](options)
    except KeyboardInterrupt:
        print("autotune: interrupted", file=sys.stderr)
        if getattr(options, "json", False):
            print(json.dumps({"error": "interrupted", "exit_code": INTERRUPTED}))
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ANSWERED
    except AutotuneError as error:
        if options.debug:
            raise
        code = commands.exit_code(error)
        if error.frames:
            frames = error.frames.rstrip().removeprefix("Traceback (most recent call last):\n")
            print(f"In your code (most recent call last):\n{frames}", file=sys.stderr)
        print(f"autotune: {error}", file=sys.stderr)
        if getattr(options, "json", False):
            print(json.dumps({"error": str(error), "exit_code": code}))
        return code
