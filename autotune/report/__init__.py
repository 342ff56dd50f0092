"""Studies and answers as plain data, and what shows them: terminal, HTML, plots."""

import random

_DRAWN = random.getstate()
import rich.style  # noqa: E402, F401  # numbers its links from a random one on, once in a process

random.setstate(_DRAWN)  # a script draws the same whether it imports autotune or not
