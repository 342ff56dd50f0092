"""The task: what the user trains. Loading and validating `model.py` lives here; nothing here knows of devices."""

from autotune.task.loading import load_task
from autotune.task.task import Task

__all__ = ["Task", "load_task"]
