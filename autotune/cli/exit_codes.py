"""What the commands return to the shell."""

ANSWERED, NOTHING_FEASIBLE, USAGE, INTERRUPTED = 0, 1, 2, 130
