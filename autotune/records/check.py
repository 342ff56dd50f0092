"""What comparing gradients found: those of a config with plain fp32's, and those of a batch with its own micro batches'."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from autotune.records.config import Choice
from autotune.records.formats import Record

REDUCED_GRADIENT_ERROR = 0.1  # a cosine does not see a wrong scale; one of 0.999 at equal norms is an error of 0.045


@dataclass(frozen=True, kw_only=True)
class Check(Record):
    """The gradients, buffers and names of a config on the user's own model, compared with plain fp32."""

    technique: str  # `config` for the whole answer, else one technique's name
    choice: Choice
    exact: bool  # held to the bound of exact techniques, else to that of reduced precision
    loss_error: float  # relative
    gradient_error: float  # relative, over all parameters
    gradient_cosine: float
    buffer_error: float  # relative, after one step
    names_equal: bool  # parameter names and state_dict keys unchanged
    # relative gradient difference between plain runs: repeated, or with all parameters moved by one ulp; 0 where it was not needed
    noise: float
    passed: bool | None  # None: the model magnifies rounding so far that the comparison says little
    reason: str = ""
    num_samples: int = 0  # that were compared, by all processes together; 0 in a check of an older version
    cause: tuple[
        str, ...
    ] = ()  # keys of the config that made it fail; `accumulation_steps` where cutting the batch did

    @property
    def says_little(self) -> bool:
        """Whether plain runs differ from each other by as much as reduced precision may."""
        return self.noise > REDUCED_GRADIENT_ERROR


@dataclass(frozen=True, kw_only=True)
class Comparison(Record):
    """The comparison of some changes with plain fp32, as a study keeps it: a later search compares them no more."""

    changes: tuple[tuple[str, Choice], ...]
    check: Check


class Verdict(StrEnum):
    """What comparing a batch with its own micro batches found."""

    SEPARABLE = "separable"
    COUPLED = "coupled"
    UNKNOWN = "unknown"


class Cause(StrEnum):
    """Why micro batches give another gradient than the whole batch."""

    SAMPLES = "samples"  # the loss of a sample depends on the others of its batch
    PADDING = "padding"  # samples are padded to the longest of their batch, and the loss sees how far
    TERMS = "terms"  # the loss adds means over different numbers of terms: no one weight per micro batch fits them all
    PARTNERS = "partners"  # something is drawn at random among the samples of the batch, as the partners of mixup are
    STATE = "state"  # each forward pass changes something in the model on which the next one depends
    WEIGHTS = "weights"  # the loss is a mean over something other than what `loss_weight` counts (samples without one)
    SCALE = "scale"  # the loss grows with the number of samples: a sum, say


@dataclass(frozen=True, kw_only=True)
class Coupling(Record):
    """Whether a batch's mean loss and its gradient equal those of its micro batches together.

    Attributes:
        cause: why they do not; None where they do, or where that is not known.
        num_samples: samples in the batch that showed the coupling, else in the largest one compared; 0 if none was.
        gradient_error: relative, of that batch; None where none was compared, or it is not finite.
        reason: what was found, in one sentence without a full stop; empty for `SEPARABLE`.
        remedy: what would allow micro batches, a text with the placeholder `{include}`; empty for `SEPARABLE`.
    """

    verdict: Verdict
    cause: Cause | None = None
    num_samples: int = 0
    gradient_error: float | None = None
    reason: str = ""
    remedy: str = ""

    @classmethod
    def unknown(cls, why: str) -> Coupling:
        """The answer "not known", with the reason."""
        return cls(
            verdict=Verdict.UNKNOWN,
            reason=f"whether the loss couples the samples of a batch is not known: {why}",
            remedy="{include} allows micro batches, if you know that the loss is a mean over samples, or over what loss_weight counts",
        )

    def allows(self, name: str) -> str:
        """The remedy, with `--include NAME` in place of `{include}`."""
        return self.remedy.format(include=f"--include {name}")

    @property
    def may_be_cut(self) -> bool:
        """Whether micro batches were found to learn the same."""
        return self.verdict is Verdict.SEPARABLE
