"""The command line: arguments in, exit codes out."""

from autotune.cli.main import main

__all__ = ["main"]
