"""The config as environment variables, for scripts and recipes of any kind."""

from __future__ import annotations

import shlex

from autotune.export.base import Export, Exporter, SearchedChoices, eval_batch_size
from autotune.records.config import Choice
from autotune.records.result import Result

PREFIX = "AUTOTUNE_"


class Env(Exporter):
    """`AUTOTUNE_BATCH_SIZE=24`, a line a key; switches are `true` or `false`."""

    name = "env"
    summary = "lines of NAME=value, for `set -a; source FILE`, Docker and make"
    says_any_config = True

    def export(self, result: Result, *, space: SearchedChoices) -> Export:
        """Every key of the config, those that are off included, the batch size for evaluation, and how many processes train."""
        found = eval_batch_size(result)
        said = {**result.config, **({"eval_batch_size": found} if found else {})}
        said |= {"num_processes": result.subject.num_processes} if result.subject.num_processes > 1 else {}
        return Export("\n".join(f"{PREFIX}{name.upper()}={_value(choice)}" for name, choice in said.items()))


def _value(choice: Choice) -> str:
    return str(choice).lower() if isinstance(choice, bool) else shlex.quote(str(choice))
