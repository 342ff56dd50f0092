"""What is imported while the process waits."""

from __future__ import annotations

import subprocess
import sys


def test_modules_are_imported_ahead_and_one_that_is_missing_is_left_to_who_needs_it():
    code = (
        "import sys; from autotune.lazy import import_ahead; import_ahead('no_such_module', 'this').join(); "
        "print('this' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("True\n")
