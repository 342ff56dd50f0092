"""How many batches each data-loading worker prepares ahead."""

from __future__ import annotations

from autotune.records.config import Choice
from autotune.techniques import Expectation, Factor
from autotune.techniques.frameworks import Argument, At, Lines, words
from autotune.techniques.num_workers import LoaderOption


class PrefetchFactor(LoaderOption):
    """`DataLoader(prefetch_factor=...)`."""

    name = "prefetch_factor"
    summary = "batches that each worker prepares ahead: evens out slow samples, takes host memory"
    choices = (2, 4, 8)
    off = 2  # torch's own default
    least = 1
    ordered = True
    applies = "with workers"
    order = 40
    expected = Expectation(data=Factor(typical=0.97, spread=1.1))  # helps where samples take unequally long
    needs_workers = True
    # Both frameworks refuse a number without workers, so torch's own default is left unset.
    frameworks = words(
        transformers=Argument("dataloader_prefetch_factor", unset=2),
        dataloader=Argument("prefetch_factor", unset=2),
        torch=Lines({At.LOADER: "prefetch_factor={choice}"}),
    )

    def label(self, choice: Choice) -> str:
        return f"prefetch {choice}"
