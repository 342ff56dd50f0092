"""What is measured beside time while a config is timed: a file each, found by being there (`autotune.probe.observers.base`)."""
