"""What a benchmark has found so far, in a file: what is there need not be run again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Kept:
    """What is found, by a key in words; with a file it is kept there as it comes, a line of JSON each.

    Args:
        path: of the file; None for none.
    """

    path: Path | None

    def found(self) -> dict[str, Any]:
        """What earlier runs have left."""
        lines = self.path.read_text().splitlines() if self.path and self.path.exists() else []
        return dict(map(json.loads, lines))

    def add(self, key: str, value: Any) -> None:
        """Keep one more."""
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps([key, value]) + "\n")

    def once(self, key: str, find: Callable[[], Any]) -> Any:
        """What is kept under a key; otherwise it is found, and kept."""
        known = self.found()
        if key not in known:
            known[key] = find()
            self.add(key, known[key])
        return known[key]

    def each(self, jobs: Mapping[str, tuple[Any, ...]], find: Callable[..., Any], pool: Executor) -> dict[str, Any]:
        """What `find` finds of each job's arguments, several at once, by the job's key; what is kept is not found again."""
        known = self.found()
        futures = {key: pool.submit(find, *arguments) for key, arguments in jobs.items() if key not in known}
        for key, future in futures.items():
            known[key] = future.result()
            self.add(key, known[key])
        return {key: known[key] for key in jobs}
