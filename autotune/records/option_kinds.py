"""Kinds of values that options take: how each is read from text or Python, and written on a command line."""

from __future__ import annotations

import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from autotune.records.price import EXPECTED, Price
from autotune.units import format_exact_bytes, format_exact_seconds, parse_bytes, parse_fraction, parse_seconds

LARGEST_SEED = 2**32 - 1  # numpy takes no larger one
ANY_BYTES = 2**40  # a percentage is checked against this total while the device is not known


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of value.

    Attributes:
        read: makes a value of text or of a Python value; returns a value that was read already as it is. Raises ValueError
            with the value and what was expected.
        python: the annotation in a signature, without `None`.
        metavar: the placeholder in the help of the command line.
        write: writes a value for a command line.
        repeated: whether the command line takes the option several times, one item each; an item begins with a name.
        choices: the words allowed, where only a few are.
    """

    read: Callable[[Any], Any]
    python: str
    metavar: str
    write: Callable[[Any], str] = str
    repeated: bool = False
    choices: tuple[str, ...] = ()


def text(metavar: str) -> Kind:
    """Any text, or a path."""

    def read(value: Any) -> str:
        if not isinstance(value, str | os.PathLike):
            raise ValueError(f"{value!r} is not text; expected {metavar}")
        return os.fspath(value)

    return Kind(read=read, python="str", metavar=metavar)


def path(metavar: str) -> Kind:
    """A file."""
    return Kind(read=Path, python="str | Path", metavar=metavar)


def _switch(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not possible; expected True or False")
    return value


def one_of(choices: tuple[str, ...]) -> Kind:
    """One of a few words."""

    def read(value: Any) -> str:
        if value not in choices:
            raise ValueError(f"{value!r} is not known; expected one of {', '.join(choices)}")
        return str(value)

    return Kind(read=read, python="str", metavar="|".join(choices), choices=choices)


def whole(low: int, expected: str, high: float = math.inf) -> Kind:
    """A whole number from `low` to `high`."""

    def read(value: Any) -> int:
        try:
            number = int(value) if isinstance(value, str) else _index(value)
        except (TypeError, ValueError):
            raise ValueError(f"{value!r} is not a whole number; expected {expected}") from None
        if not low <= number <= high:
            raise ValueError(f"{number} is not possible; expected {expected}")
        return number

    return Kind(read=read, python="int", metavar="N")


def _index(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _number(parse: Callable[[str], float], low: float, high: float, expected: str, value: Any) -> float:
    if isinstance(value, str):
        number = parse(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value)
    else:
        raise ValueError(f"{value!r} is not possible; expected {expected}")
    if not low <= number < high:
        raise ValueError(f"{value!r} is not possible; expected {expected}")
    return number


def _memory(value: Any) -> Any:
    if isinstance(value, str):
        num_bytes = parse_bytes(value, total_bytes=ANY_BYTES)
        return value if "%" in value else num_bytes
    return int(_number(parse_fraction, 1, math.inf, "more than 0 bytes, such as 12GiB, 1500MiB or 80%", value))


def _items(value: Any, expected: str) -> Iterator[str]:
    """The items of a list of texts; a single text is its own only item."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Iterable):
        raise ValueError(f"{value!r} is not possible; expected {expected}")
    for item in items:
        if not isinstance(item, str):
            raise ValueError(f"{item!r} is not possible; expected {expected}")
        yield item


def _named(read: Callable[[str], Any], example: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    named = {}
    for item in _items(value, f"for example {example}"):
        name, separator, choice = item.partition("=")
        if not separator:
            raise ValueError(f"{item!r} is not NAME=CHOICE; expected for example {example}")
        named[name] = read(choice)
    return named


def _choice(written: str) -> Any:
    """A choice, read as JSON where it is JSON."""
    try:
        return json.loads(written)
    except json.JSONDecodeError:
        return written


def _choices(written: str) -> tuple[Any, ...]:
    return tuple(_choice(part) for part in written.split(","))


def _texts(value: Any) -> dict[str, dict[Any, str]]:
    """`amp:off=,bf16=--bf16`: a comma before the next `choice=` separates, any other belongs to the text."""
    if isinstance(value, Mapping):
        return {name: dict(texts) for name, texts in value.items()}
    found = {}
    for item in [value] if isinstance(value, str) else value:
        name, _, listed = item.partition(":")
        texts = [part.partition("=") for part in re.split(r",(?=[\w.]+=)", listed)]
        if not name.isidentifier() or not all(choice and separator for choice, separator, _ in texts):
            raise ValueError(f"{item!r} is not NAME:CHOICE=TEXT,...; expected for example fused:off=,on=--fused")
        found[name] = {_choice(choice): text for choice, _, text in texts}
    return found


def _price(value: Any) -> Price:
    if isinstance(value, Price):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a price; {EXPECTED}")
    return Price.parse(value)


def _seconds_or_auto(value: Any) -> Any:
    if value == "auto":
        return None
    try:
        return SECONDS.read(value)
    except ValueError as error:
        raise ValueError(f"{error}; or auto") from None


SWITCH = Kind(read=_switch, python="bool", metavar="")  # on a command line a word without a value
COUNT = whole(1, "at least 1")
SEED = whole(0, f"a number from 0 to {LARGEST_SEED}", LARGEST_SEED)
SECONDS = Kind(
    read=partial(_number, parse_seconds, math.ulp(0.0), math.inf, "more than 0 seconds, such as 90s, 5m or 1.5h"),
    python="str | float",
    metavar="90s|5m",
    write=format_exact_seconds,
)
SECONDS_OR_AUTO = Kind(
    read=_seconds_or_auto,
    python="str | float",
    metavar="auto|90s|5m",
    write=format_exact_seconds,
)
SHARE = Kind(
    read=partial(_number, parse_fraction, 0.0, 1.0, "a share from 0% to below 100%"),
    python="str | float",
    metavar="5%",
    write=lambda share: f"{100 * share:g}%",
)
PRICE = Kind(read=_price, python="str", metavar="2.50/h")
MEMORY = Kind(
    read=_memory, python="str | int", metavar="12GiB|80%", write=lambda num_bytes: format_exact_bytes(int(num_bytes))
)
NAMES = Kind(
    read=lambda value: tuple(_items(value, "a name, or a list of names")),
    python="Iterable[str]",
    metavar="NAME",
    repeated=True,
)
CHOICE_OF = Kind(
    read=partial(_named, _choice, "amp=bf16"), python="Mapping[str, Choice]", metavar="NAME=CHOICE", repeated=True
)
CHOICES_OF = Kind(
    read=partial(_named, _choices, "amp=off,bf16"),
    python="Mapping[str, Sequence[Choice]]",
    metavar="NAME=A,B,...",
    repeated=True,
)
TEXTS_OF = Kind(read=_texts, python="Mapping[str, Mapping[Choice, str]]", metavar="NAME:CHOICE=TEXT,...", repeated=True)
