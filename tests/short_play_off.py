"""The command line with a play-off of its fewest rounds: how closely a gain is known is no matter of most tests, and a noisy machine
makes the play-off go on for as long as the budget lasts.
"""

from __future__ import annotations

import sys

SHORTEN = "from autotune.tuning import playoff; playoff.MAX_ROUNDS = playoff.MIN_ROUNDS"
AUTOTUNE = (sys.executable, "-c", f"{SHORTEN}; from autotune.cli import main; raise SystemExit(main())")
