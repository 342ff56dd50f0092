"""A study in formats for other programs. Each module of this package is one, with `render(study)`; `autotune show --NAME` prints it."""

from __future__ import annotations

import importlib

from autotune.study.reading import Study


def render(study: Study, name: str) -> str:
    """The study in the format of that name, with a newline at its end."""
    text: str = importlib.import_module(f"{__name__}.{name}").render(study)
    return text if text.endswith("\n") else f"{text}\n"
