"""The task: what the user trains. This package loads and validates `model.py`, and does not know devices."""

from autotune.task.loading import load_task
from autotune.task.task import Task

__all__ = ["Task", "load_task"]
