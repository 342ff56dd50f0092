"""The history of trials, kept in an Optuna storage."""
