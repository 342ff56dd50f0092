"""Memory and time before a probe: models that know nothing of Optuna, of processes or of the terminal."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
