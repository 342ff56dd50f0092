"""The command line: it runs a command, and turns an exception into an exit code, a message and, with `--json`, a document."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
import traceback
from collections.abc import Sequence

from autotune.cli.failures import failure_document, verdict
from autotune.cli.parser import ANSWERED, UsageError, build_parser
from autotune.cli.process_title import hide_passwords
from autotune.errors import AutotuneError
from autotune.runners.start import started_ahead

__all__ = ["main"]

AHEAD = ("search", "probe", "verify")
ELSEWHERE = ("replay", "runner", "script", "slots")  # the options with which others start what trains


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code; only `--help` and `--version` exit from within argparse."""
    began_s = time.monotonic()
    given = sys.argv[1:] if arguments is None else arguments
    hide_passwords(given)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal without Unicode shows `?` for what it lacks
        sys.stdout.reconfigure(errors="replace")
    parser = build_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could come next
        import argcomplete

        argcomplete.autocomplete(parser)
    try:
        options = parser.parse_args(given)
        options.began_s = began_s
    except UsageError as error:
        return _fail(error, as_json="--json" in given)
    code: int = ANSWERED
    try:
        with _ahead(options):
            from autotune.cli import commands

            code = getattr(commands, options.command)(options)
        sys.stdout.flush()  # a full disk would show only when Python ends, and change the exit code
        return code
    except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
        _discard_stdout()
        return code
    except (Exception, KeyboardInterrupt) as error:
        return _fail(error, as_json="--json" in given, debug=options.debug)


def _ahead(options: argparse.Namespace) -> contextlib.AbstractContextManager[None]:
    """Starts what imports torch while this process imports what searches, where the command trains a model file on this machine."""
    if (
        options.command not in AHEAD
        or sys.platform != "linux"
        or any(getattr(options, name, None) for name in ELSEWHERE)
    ):
        return contextlib.nullcontext()
    return started_ahead()


def _fail(error: BaseException, *, as_json: bool, debug: bool = False) -> int:
    """Say what went wrong, on stderr and, with `as_json`, as the document on stdout. Returns the exit code."""
    code, message = verdict(error)
    with contextlib.suppress(OSError):  # nobody may be reading it
        if debug or not isinstance(error, AutotuneError | OSError | KeyboardInterrupt):
            traceback.print_exception(error)
        if isinstance(error, AutotuneError) and error.frames:
            frames = error.frames.rstrip().removeprefix("Traceback (most recent call last):\n")
            traced = '  File "' in frames  # else it is what a program printed
            head = f"In {error.frames_of} (most recent call last)" if traced else "Its output ends with"
            print(f"{head}:\n{frames}", file=sys.stderr)
        print(f"autotune: {message}", file=sys.stderr)
    try:
        if as_json:
            print(failure_document(error))
        sys.stdout.flush()
    except OSError:  # it was stdout that failed
        _discard_stdout()
    return code


def _discard_stdout() -> None:
    """Send stdout nowhere: Python writes what is left of it when it ends, and would exit with a code of its own."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
