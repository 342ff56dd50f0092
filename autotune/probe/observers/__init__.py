"""Observers measure what else happens while a config is timed; each is a file, found by being here (`autotune.probe.observers.base`)."""
