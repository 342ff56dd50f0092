"""The command line's grammar: its commands, and what they take about files and output. Other options: `autotune.records.options`."""

from __future__ import annotations

import argparse
import difflib
import pkgutil
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from autotune.errors import AutotuneError
from autotune.records.option_kinds import SHARE, SWITCH, Kind, whole
from autotune.records.options import (
    DEVICES,
    KEPT,
    ONE_DEVICE,
    TASK,
    CommandOptions,
    ExplainOptions,
    Option,
    PredictOptions,
    ProbeOptions,
    RunOptions,
    SearchOptions,
    SweepOptions,
    VerifyOptions,
    table,
)
from autotune.version import __version__

ANSWERED, NOTHING_FEASIBLE, USAGE, INTERRUPTED = 0, 1, 2, 130  # what the commands return to the shell
EXIT_CODES = "exit codes: 0 answered; 1 nothing feasible; 2 usage, model file or environment; 130 interrupted"
CONFIG = "a config dict, or the JSON of a search"
RUN, OUTPUT = "what to run", "output"  # groups in `--help`, beside those of the table
SHELLS = ("bash", "zsh", "fish")
EVERYTHING = "all"  # what `priors --forget` takes in place of a name
PORT = whole(0, "a port from 0 to 65535", 65535)
# -5s, -5%, -1GiB are taken for values, which their options refuse in their own words, and not for flags
_NEGATIVE = re.compile(r"-(\.?\d|(inf|nan)\b)", re.IGNORECASE)
MAX_REGRESSION = 0.05  # how much slower than in its study an answer may be for `verify --against`
STUDY = "a database file, its name without studies/ and .db, or a storage URL"


class UsageError(AutotuneError):
    """The command line cannot be understood."""


class Parser(argparse.ArgumentParser):
    """Raises UsageError where argparse's own prints its usage and ends the process."""

    commands: Mapping[str, argparse.ArgumentParser]

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._groups: dict[str, argparse._ArgumentGroup] = {}
        self._negative_number_matcher = _NEGATIVE

    def group(self, title: str) -> argparse._ArgumentGroup:
        """The group of options under this title in `--help`; it is made when it is first asked for."""
        return self._groups.get(title) or self._groups.setdefault(title, self.add_argument_group(title))

    def error(self, message: str) -> NoReturn:
        """Refuse the arguments."""
        raise UsageError(f"{message}; see `{self.prog} --help`")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """The arguments as options. An option that does not exist is refused, and a near one offered."""
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            command = self.commands[options.command]
            flags = re.findall(r"--[a-z-]+", command.format_help())
            near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise UsageError(
                f"{unknown[0]!r} is not an argument of `{command.prog}`{meant}; see `{command.prog} --help`"
            )
        if options.command == "search" and (wrong := _not_one_task(options)):
            self.commands["search"].error(wrong)
        return options


def _not_one_task(options: argparse.Namespace) -> str:
    """Why the arguments do not name exactly one task for a search; empty where they do."""
    scripts = options_given(options, CommandOptions).keys() - options_given(options, SearchOptions).keys()
    if options.script is not None and (options.model or options.replay):
        return f"--command and {options.model or options.replay} are two things to search; leave one out"
    if options.runner and (options.script or options.replay):
        return f"--runner {options.runner} probes a model file; leave it out, or {'--command' if options.script else '--replay'}"
    if options.script is None and scripts:
        return f"--{min(scripts)} is an option for training scripts; give the script's command line by --command"
    if options.script is None and options.model is None:
        return 'expected MODEL, a model file, or --command "python train.py --batch {batch_size}"'
    return ""


def _add_to_search(parser: Parser) -> None:
    parser.group(RUN).add_argument(
        "--command",
        dest="script",
        metavar="COMMAND",
        help="probe this command line in place of a model file; {batch_size}, {accumulation_steps}, {devices}, "
        "{output_dir} and the {NAME} of each --choices are filled in",
    )
    parser.group(RUN).add_argument("--replay", metavar="TABLE.csv", help="search a recorded table; nothing is trained")
    parser.group(RUN).add_argument(
        "--runner",
        metavar="NAME[:WHERE]",
        help="probe on other machines: the runner's name and, behind a colon, where; an unknown NAME lists them all",
    )
    parser.group(OUTPUT).add_argument(
        "--out", metavar="FILE", help="write the JSON document to FILE too, also that of an error"
    )
    parser.group(OUTPUT).add_argument(
        "--track",
        action="append",
        default=[],
        metavar="NAME[:WHERE]",
        help="keep every probe and the answer in a tracker, too: tensorboard:DIR, wandb:PROJECT, mlflow:URI",
    )
    parser.group(OUTPUT).add_argument("--quiet", action="store_true", help="only warnings on stderr")
    _add_json(parser)


def _add_to_probe(parser: Parser) -> None:
    parser.group(RUN).add_argument("--config", required=True, metavar="JSON|FILE", help=CONFIG)
    _add_json(parser)


def _add_to_verify(parser: Parser) -> None:
    verified = parser.group(RUN).add_mutually_exclusive_group(required=True)
    verified.add_argument("--config", metavar="JSON|FILE", help=CONFIG)
    verified.add_argument(
        "--against", metavar="STUDY", help="run its answer, and exit with 1 where it has become slower"
    )
    parser.group(RUN).add_argument(
        "--max-regression",
        type=_reader(SHARE),
        metavar="PERCENT",
        help=f"how much slower the answer may be than it was (default: {MAX_REGRESSION:.0%}%)",
    )
    parser.group(RUN).add_argument(
        "--study", metavar="NAME", help="which study, if the file of --against holds several"
    )
    _add_json(parser)


def _add_to_show(parser: Parser) -> None:
    _add_study(parser)
    forms = parser.group(OUTPUT).add_mutually_exclusive_group()
    for name in _names_of_forms():
        forms.add_argument(
            f"--{name}", dest="form", action="store_const", const=name, help=f"the study as {name.upper()} on stdout"
        )


def _add_to_report(parser: Parser) -> None:
    _add_study(parser)
    parser.group(OUTPUT).add_argument(
        "--html", metavar="FILE", help="the page to write (default: the study's name with .html)"
    )


def _add_to_dashboard(parser: Parser) -> None:
    parser.add_argument("study_file", metavar="STUDY", help=STUDY)
    parser.group(OUTPUT).add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="where to listen; whoever reaches it may change the study (default: 127.0.0.1, this machine alone)",
    )
    parser.group(OUTPUT).add_argument(
        "--port", type=_reader(PORT), default=8080, metavar=PORT.metavar, help="the port (default: 8080)"
    )


def _add_to_compare(parser: Parser) -> None:
    parser.add_argument("study_files", nargs="+", metavar="STUDY", help=STUDY)
    parser.group(KEPT).add_argument(
        "--study", action="append", metavar="NAME", help="which study of each file, in order; one for all if given once"
    )
    _add_json(parser)


def _add_to_export(parser: Parser) -> None:
    _add_study(parser)
    to = parser.group(OUTPUT).add_argument(
        "--to",
        required=True,
        metavar="NAME",
        help="the form: json or env, for example; an unknown NAME lists them all",
    )
    _complete(to, _names_of_exporters)
    parser.group(OUTPUT).add_argument("--out", metavar="FILE", help="write to FILE instead of stdout")
    parser.group(OUTPUT).add_argument(
        "--force", action="store_true", help="also an answer that was not shown to train as plain fp32 does"
    )


def _add_to_predict(parser: Parser) -> None:
    parser.group(RUN).add_argument("--config", metavar="JSON|FILE", help=f"this config alone: {CONFIG}")
    _add_json(parser)


def _add_to_explain(parser: Parser) -> None:
    parser.group(RUN).add_argument("--config", metavar="JSON|FILE", help=f"{CONFIG}; default: the task's baseline")
    parser.group(OUTPUT).add_argument("--picture", metavar="FILE", help="draw it, too, as FILE.png, .svg or .pdf")
    _add_json(parser)


def _add_to_sweep(parser: Parser) -> None:
    parser.group(OUTPUT).add_argument("--quiet", action="store_true", help="no line per probe on stderr")


def _add_to_devices(parser: Parser) -> None:
    parser.group(OUTPUT).add_argument("--watch", action="store_true", help="refresh until Ctrl-C")
    _add_json(parser)


def _add_to_priors(parser: Parser) -> None:
    parser.group(KEPT).add_argument("--folder", metavar="FOLDER", help="of the studies (default: studies)")
    parser.group(KEPT).add_argument(
        "--forget",
        metavar=f"NAME|{EVERYTHING}",
        help="forget what this study taught (the name of its task is enough for an only one), or what all did; the studies themselves stay",
    )
    _add_json(parser)


def _add_to_doctor(parser: Parser) -> None:
    parser.group(TASK).add_argument(
        "--device", default="auto", metavar="NAME", help="auto, cpu, cuda or cuda:1 (default: auto)"
    )
    parser.group(TASK).add_argument(
        DEVICES.flag,
        default=ONE_DEVICE,
        metavar=DEVICES.kind.metavar,
        help="how these devices work together, too",
    )
    _add_json(parser)


def _add_to_init(parser: Parser) -> None:
    parser.add_argument("file", nargs="?", default="model.py", metavar="FILE")


def _add_to_completion(parser: Parser) -> None:
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=f"one of {', '.join(SHELLS)}")


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        add_arguments: adds what is its own.
        options: the table of options of a command that takes a model; None for others.
    """

    name: str
    help: str
    add_arguments: Callable[[Parser], None]
    options: type[RunOptions] | None = None


COMMANDS = (
    Command("search", "find the best config of a model file, or of a training script", _add_to_search, CommandOptions),
    Command("probe", "run one config once", _add_to_probe, ProbeOptions),
    Command("verify", "a long run of one config, with real data", _add_to_verify, VerifyOptions),
    Command("show", "probes, front and answer of a study, with the reasons", _add_to_show),
    Command("report", "a study as one HTML page that needs no network", _add_to_report),
    Command("dashboard", "optuna-dashboard on a study, in a browser, until Ctrl-C", _add_to_dashboard),
    Command("compare", "the answers of several studies side by side: machines, versions, models", _add_to_compare),
    Command("export", "the answer in the form that a framework reads", _add_to_export),
    Command(
        "predict", "the largest batch that fits, without training and without a GPU", _add_to_predict, PredictOptions
    ),
    Command(
        "explain", "where memory and time go, layer by layer, and what to do about it", _add_to_explain, ExplainOptions
    ),
    Command("sweep", "measure a whole space into a table, for comparing searches", _add_to_sweep, SweepOptions),
    Command("devices", "memory, utilisation, temperature, power, processes", _add_to_devices),
    Command("priors", "what finished studies teach later searches: of what, how large; forget it", _add_to_priors),
    Command("doctor", "prove on this machine, in a minute, what a search assumes", _add_to_doctor),
    Command("init", "write a commented model.py that runs as it is", _add_to_init),
    Command(
        "completion", 'a shell\'s completion of these commands: eval "$(autotune completion bash)"', _add_to_completion
    ),
)


def build_parser() -> Parser:
    """The parser of every command; `command` in the result names the one that was given. It raises UsageError.

    An option of the table that was not given is absent from the result: `options_given` finds those that were.
    """
    parser = Parser(
        prog="autotune",
        description="Find the fastest way to train a PyTorch model on this machine, by really training it.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"autotune {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    parser.commands = commands.choices
    for command in COMMANDS:
        made: Parser = commands.add_parser(command.name, help=command.help, description=command.help, epilog=EXIT_CODES)
        if command.options is not None:
            nargs = "?" if command.options is CommandOptions else None
            made.add_argument(
                "model", metavar="MODEL", help="model.py, or model.py:task for a Task object in it", nargs=nargs
            )
            _add_table(made, command.options)
        made.group(OUTPUT).add_argument("--debug", action="store_true", help="show tracebacks of autotune's own code")
        command.add_arguments(made)
    return parser


def options_given(namespace: argparse.Namespace, options: type[RunOptions]) -> dict[str, Any]:
    """The options of the table that the user gave, by name, as text. The Python API takes them so."""
    return {option.name: getattr(namespace, option.name) for option in table(options) if option.name in namespace}


def _add_table(parser: Parser, options: type[RunOptions]) -> None:
    for option, default in table(options).items():
        if option.kind is SWITCH:
            parser.group(option.group).add_argument(
                option.flag, action="store_true", default=argparse.SUPPRESS, help=option.help
            )
            continue
        known = "" if default in (None, MISSING) or not default else f" (default: {option.kind.write(default)})"
        action = parser.group(option.group).add_argument(
            option.flag,
            action="append" if option.kind.repeated else "store",
            type=_check_with(option),
            default=argparse.SUPPRESS,
            required=default is MISSING,
            metavar=option.kind.metavar,
            help=f"{option.help}{known}".replace("%", "%%"),
        )
        if option.kind.choices:
            _complete(action, partial(tuple, option.kind.choices))
        elif option.kind.repeated:
            _complete(action, _names_of_techniques)


def _complete(action: argparse.Action, words: Callable[[], Iterable[str]]) -> None:
    """Let a shell complete the option's value by these words, which are computed only then."""
    action.completer = lambda **context: words()  # type: ignore[attr-defined]  # argcomplete's protocol


def _check_with(option: Option) -> Callable[[str], str]:
    """An argparse type that refuses what the option's kind cannot read, in the kind's words, and leaves the text as it is."""
    read = _reader(option.kind)

    def check(text: str) -> str:
        read(text)
        return text

    return check


def _add_json(parser: Parser) -> None:
    parser.group(OUTPUT).add_argument("--json", action="store_true", help="one JSON document on stdout")


def _add_study(parser: Parser) -> None:
    parser.add_argument("study_file", metavar="STUDY", help=STUDY)
    parser.group(KEPT).add_argument("--study", metavar="NAME", help="which study, if the file holds several")


def _reader(kind: Kind) -> Callable[[str], Any]:
    """An argparse type that reads as the kind does, and refuses in the kind's words."""

    def read(text: str) -> Any:
        try:
            return kind.read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _names_of_techniques() -> list[str]:
    from autotune.techniques import find_techniques

    return sorted(find_techniques())


def _names_of_exporters() -> list[str]:
    from autotune.export import exporters

    return sorted(exporters())


def _names_of_forms() -> list[str]:
    """The modules of `autotune.report.formats`, none of which is imported: they take seconds."""
    folder = Path(__file__).parent.parent / "report" / "formats"
    return sorted(module.name for module in pkgutil.iter_modules([str(folder)]))
