"""What comparing a config with plain fp32 found."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.records.config import Choice
from autotune.records.formats import Record


@dataclass(frozen=True, kw_only=True)
class Check:
    """The gradients, buffers and names of a config on the user's own model, compared with plain fp32."""

    technique: str  # `config` for the whole answer, else one technique's name
    choice: Choice
    exact: bool  # held to the bound of exact techniques, else to that of reduced precision
    loss_error: float  # relative
    gradient_error: float  # relative, over all parameters
    gradient_cosine: float
    buffer_error: float  # relative, after one step
    names_equal: bool  # parameter names and state_dict keys unchanged
    noise: float  # relative gradient difference between two plain runs, or for one ulp
    passed: bool | None  # None: the model magnifies rounding so far that the comparison says little
    reason: str = ""
    cause: tuple[str, ...] = ()  # keys of the config that made it fail; `accumulation_steps`: cutting the batch

    def __post_init__(self) -> None:
        object.__setattr__(self, "cause", tuple(self.cause))  # a list where it comes from JSON


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """Some changes of a config, compared with plain fp32."""

    changes: tuple[tuple[str, Choice], ...]
    check: Check
