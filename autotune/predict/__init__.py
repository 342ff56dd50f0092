"""Memory and time before a probe: models that know nothing of Optuna, of processes or of the terminal."""
