"""How to run an answer as it was measured: its config, lines of Python, and a command, as text to paste.

`model` names the task as `autotune.prepare` and the command line take it, empty for a task built in Python; `asked` is
the `asked` of a `Result`. What is a default is left out, so that the lines stay short.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from autotune.records.config import Choice
from autotune.records.options import words
from autotune.report.sections import Code
from autotune.techniques import Techniques

VERIFY_STEPS = 100


def as_code(config: Mapping[str, Choice], techniques: Techniques, head: str = "") -> Code:
    """`head` and the config's essentials as a dict literal of Python."""
    literals = {
        name: json.dumps(choice) if isinstance(choice, str) else repr(choice)
        for name, choice in _essentials(config, techniques).items()
    }
    return Code(f"{head}{{", tuple(f'"{name}": {literal}' for name, literal in literals.items()), "}")


def as_json(config: Mapping[str, Choice], techniques: Techniques) -> str:
    """The config's essentials as one line of JSON, for `--config`."""
    return json.dumps(_essentials(config, techniques))


def _essentials(config: Mapping[str, Choice], techniques: Techniques) -> dict[str, Choice]:
    """The batch, and every technique that is not off: what `prepare` needs to build the same config."""
    return {name: choice for name, choice in config.items() if not techniques.is_off(name, choice)}


def python_lines(model: str, asked: Mapping[str, str | int]) -> tuple[Code, ...]:
    """A training loop, with the config in `config`, and a task built in Python in `task`."""
    task = json.dumps(model, ensure_ascii=False) if model else "task"
    options = [f"{name}={json.dumps(asked[name])}" for name in ("device", "global_batch") if name in asked]
    call = Code("session = autotune.prepare(", (task, "config", *options), ")")
    return call, Code("for batch in session.loader:"), Code("    loss = session.step(batch)")


def verify_command(
    config: Mapping[str, Choice], techniques: Techniques, model: str, asked: Mapping[str, str | int]
) -> str:
    """The `autotune verify` of a config, quoted for a shell; empty for a task built in Python, which has no command."""
    if not model:
        return ""
    command = ["autotune", "verify", model, "--config", as_json(config, techniques), "--steps", str(VERIFY_STEPS)]
    return shlex.join([*command, *words(asked)])
