"""Frozen data that passes between the rooms, with units in its names. Knows nothing else of the package."""
