"""A search as experiment trackers know it. One file a tracker."""

from autotune.trackers.base import Answer, Point, Start, Tracker
from autotune.trackers.discovery import tracker, trackers

__all__ = ["Answer", "Point", "Start", "Tracker", "tracker", "trackers"]
