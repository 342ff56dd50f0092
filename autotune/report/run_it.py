"""How to run an answer as it was measured: lines of Python, and a command, as text to paste.

`model` names the task as `autotune.prepare` and the command line take it, empty for a task built in Python; `asked` is
the `asked` of a `Result`. What is a default is left out, so that the lines stay short.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping

from autotune.records.options import words
from autotune.report.sections import Code
from autotune.report.words import as_json
from autotune.techniques.labels import AnyConfig

VERIFY_STEPS = 100


def python_lines(model: str, asked: Mapping[str, str | int]) -> tuple[Code, ...]:
    """A training loop, with the config in `config`, and a task built in Python in `task`."""
    task = json.dumps(model, ensure_ascii=False) if model else "task"
    options = [f"{name}={json.dumps(asked[name])}" for name in ("device", "global_batch") if name in asked]
    call = Code("session = autotune.prepare(", (task, "config", *options), ")")
    return call, Code("for batch in session.loader:"), Code("    loss = session.step(batch)")


def verify_command(config: AnyConfig, model: str, asked: Mapping[str, str | int]) -> str:
    """The `autotune verify` of a config, quoted for a shell; empty for a task built in Python, which has no command."""
    if not model:
        return ""
    command = ["autotune", "verify", model, "--config", as_json(config), "--steps", str(VERIFY_STEPS)]
    return shlex.join([*command, *words(asked)])
