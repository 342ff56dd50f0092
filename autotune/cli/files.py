"""The files that a command line names: configs to read, and outputs, which never replace a file that is read."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from autotune.errors import ConfigError

EXAMPLE = '{"batch_size": 16}'


def read_config(text: str) -> dict[str, Any]:
    """A config dict from JSON text or a file; a search's whole JSON document counts, too.

    Raises:
        ConfigError: neither JSON nor a readable file with a JSON object.
    """
    is_json = text.lstrip().startswith("{")
    try:
        content = text if is_json else Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"--config {text!r} cannot be read: {why}; expected a file, or an object such as {EXAMPLE}"
        ) from None
    try:
        config = json.loads(content)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--config {text!r} is not valid JSON: {error}; expected an object such as {EXAMPLE}"
        ) from None
    if isinstance(config, dict) and isinstance(config.get("result"), dict):  # of `show --json`
        config = config["result"]
    if isinstance(config, dict) and isinstance(config.get("config"), dict):
        config = config["config"]
    if not isinstance(config, dict):
        raise ConfigError(f"--config {text!r} is a JSON {type(config).__name__}; expected an object such as {EXAMPLE}")
    return config


def require_writable(path: Path, flag: str) -> None:
    """Raise ConfigError where an output cannot be written: before a search rather than after it."""
    if path.is_dir() or not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise ConfigError(
            f"{flag} {path} cannot be written; expected a file in a folder that exists and may be written to"
        )


def require_other(path: Path, flag: str, what: str, *read: Path | str | None) -> None:
    """Raise ConfigError where an output is one of the files that the command reads.

    Args:
        what: says what these files are.
    """
    for file in read:
        if file and path.exists() and Path(file).is_file() and path.samefile(file):
            raise ConfigError(f"{flag} {path} is {what} itself; expected another file")


def write(path: Path, flag: str, content: str) -> None:
    """Write an output. Raises ConfigError where that fails."""
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path} cannot be written: {error.strerror}; the study keeps the result") from None
