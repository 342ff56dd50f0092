"""The command line's grammar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from autotune import __version__
from autotune.errors import AutotuneError
from autotune.units import parse_bytes, parse_fraction, parse_seconds

EXIT_CODES = "exit codes: 0 answered; 1 nothing feasible; 2 usage, model file or environment; 130 interrupted"


class UsageError(AutotuneError):
    """The command line is not one of ours."""


class _Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse's own ends the process."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        raise UsageError(f"{message}; see `{self.prog} --help`")


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; `command` in the result names the one that was given. It raises UsageError."""
    parser = _Parser(
        prog="autotune",
        description="Find the fastest way to train a PyTorch model on this machine, by really training it.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"autotune {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_search(commands)
    _add_probe(commands)
    _add_verify(commands)
    _add_show(commands)
    _add_sweep(commands)
    _add_predict(commands)
    devices = commands.add_parser("devices", help="memory, utilisation, temperature, power, processes")
    devices.add_argument("--watch", action="store_true", help="refresh until Ctrl-C")
    devices.add_argument("--json", action="store_true", help="one JSON document on stdout")
    init = commands.add_parser("init", help="write a commented model.py that runs as it is")
    init.add_argument("file", nargs="?", default="model.py", metavar="FILE")
    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", help="show tracebacks of autotune's own code")
    return parser


def _add_search(commands: Any) -> None:
    search = commands.add_parser("search", help="find the best config of a model file", epilog=EXIT_CODES)
    _add_model(search)
    search.add_argument("--objective", default="throughput", choices=("throughput", "memory", "balanced"))
    search.add_argument("--headroom", type=_checked(parse_fraction), default=0.05, metavar="5%", help="left free (5%%)")
    search.add_argument(
        "--budget", type=_checked(parse_seconds), default=300.0, metavar="5m", help="for everything (5m)"
    )
    search.add_argument("--trials", type=int, metavar="N", help="at most N probes before the play-off")
    search.add_argument("--fix", action="append", default=[], metavar="NAME=CHOICE", help="use this choice only")
    search.add_argument(
        "--include", action="append", default=[], metavar="NAME", help="search an optional technique too"
    )
    search.add_argument("--exclude", action="append", default=[], metavar="NAME", help="leave as in the baseline")
    search.add_argument(
        "--sampler", default="cost-model", metavar="NAME", help="cost-model, gp, tpe, random or grid (cost-model)"
    )
    search.add_argument("--seed", type=int, default=0, metavar="N")
    search.add_argument("--probe-timeout", type=_checked(parse_seconds), metavar="60s", help="kill a probe after that")
    search.add_argument("--study", metavar="NAME", help="name of the study (the task's)")
    search.add_argument("--storage", metavar="URL", help="database file or Optuna URL (studies/<task>.db)")
    search.add_argument("--out", metavar="FILE", help="write the JSON document there too")
    search.add_argument("--json", action="store_true", help="one JSON document on stdout")
    search.add_argument("--quiet", action="store_true", help="only warnings on stderr")


def _add_probe(commands: Any) -> None:
    probe = commands.add_parser("probe", help="run one config once", epilog=EXIT_CODES)
    _add_model(probe)
    _add_config(probe)
    probe.add_argument("--timeout", type=_checked(parse_seconds), metavar="60s")
    probe.add_argument("--json", action="store_true", help="one JSON document on stdout")


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser("verify", help="a long run of one config, with real data", epilog=EXIT_CODES)
    _add_model(verify)
    _add_config(verify)
    verify.add_argument("--steps", type=int, required=True, metavar="N", help="optimizer steps")
    verify.add_argument("--timeout", type=_checked(parse_seconds), metavar="1h")
    verify.add_argument("--json", action="store_true", help="one JSON document on stdout")


def _add_show(commands: Any) -> None:
    show = commands.add_parser("show", help="trials, front, recommendation, why", epilog=EXIT_CODES)
    show.add_argument("study_file", metavar="STUDY", help="a database file, or a storage URL with --study")
    show.add_argument("--study", metavar="NAME")
    form = show.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON document on stdout")
    form.add_argument("--csv", action="store_true", help="one line per probe")


def _add_sweep(commands: Any) -> None:
    sweep = commands.add_parser(
        "sweep", help="measure a whole space into a table, to compare searches on", epilog=EXIT_CODES
    )
    _add_model(sweep)
    sweep.add_argument("--out", required=True, metavar="FILE.csv", help="the table; one that is there is carried on")
    sweep.add_argument(
        "--grid", action="append", default=[], metavar="NAME=A,B,...", help="sweep these choices of a technique only"
    )
    sweep.add_argument("--include", action="append", default=[], metavar="NAME", help="sweep an optional technique too")
    sweep.add_argument("--exclude", action="append", default=[], metavar="NAME", help="leave as in the baseline")
    sweep.add_argument(
        "--interval", type=_checked(parse_fraction), default=0.03, metavar="3%", help="repeat until known so well (3%%)"
    )
    sweep.add_argument("--max-repeats", type=int, default=8, metavar="N", help="but no more often than that (8)")
    sweep.add_argument(
        "--timed",
        type=_checked(parse_seconds),
        default=0.5,
        metavar="0.5s",
        help="time each probe for at most that (0.5s)",
    )
    sweep.add_argument("--probe-timeout", type=_checked(parse_seconds), default=120.0, metavar="120s")
    sweep.add_argument("--seed", type=int, default=0, metavar="N")
    sweep.add_argument("--quiet", action="store_true", help="no line per probe on stderr")


def _add_predict(commands: Any) -> None:
    predict = commands.add_parser(
        "predict", help="what fits into a memory, without training and without a GPU", epilog=EXIT_CODES
    )
    _add_model(predict)
    predict.add_argument("--gpu", metavar="80GiB|NAME", help="a card that need not be here, e.g. 'A100 80GB'")
    predict.add_argument("--config", metavar="JSON|FILE", help="this config alone, or a search's JSON")
    predict.add_argument(
        "--headroom", type=_checked(parse_fraction), default=0.05, metavar="5%", help="left free (5%%)"
    )
    predict.add_argument(
        "--timeout",
        type=_checked(parse_seconds),
        default=120.0,
        metavar="2m",
        help="leave out what is not traced by then",
    )
    predict.add_argument("--json", action="store_true", help="one JSON document on stdout")


def _add_model(parser: Any) -> None:
    parser.add_argument("model", metavar="MODEL", help="model.py, or model.py:task for a Task object in it")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda[:i]")
    parser.add_argument(
        "--memory-limit", type=_checked(_bytes_or_share), metavar="12GiB|80%", help="default: what is free"
    )
    parser.add_argument("--global-batch", type=int, metavar="N", help="samples per optimizer step")


def _add_config(parser: Any) -> None:
    parser.add_argument("--config", required=True, metavar="JSON|FILE", help="a config dict, or a search's JSON")


def _bytes_or_share(text: str) -> str:
    parse_bytes(text, total_bytes=2**40)
    return text


def _checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """An argparse type that shows the parser's own message."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
