"""`python -m autotune.techniques` prints the README's table of techniques."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.techniques import Technique, Techniques, find_techniques

_COLUMNS = ("technique", "choices", "what it does, what it trades", "gradients", "applies")


def table(techniques: Techniques) -> str:
    """The techniques as a Markdown table, in their order."""

    def lines() -> Iterator[tuple[str, ...]]:
        yield _COLUMNS
        yield ("---",) * len(_COLUMNS)
        for name, technique in techniques.items():
            gradients = "exact" if technique.exact else "reduced precision"
            if technique.changes_learning:
                gradients = "of another training"
            yield f"`{name}`", _choices(technique), technique.summary, gradients, technique.applies

    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines())


def _choices(technique: Technique) -> str:
    listed = (f"{c}" if type(c) is int else f"`{str(c).lower()}`" for c in technique.choices)
    return technique.listed_choices or " ".join(listed)


if __name__ == "__main__":
    print(table(find_techniques()))  # noqa: T201
