"""The answer of a search in other words: a file's, a shell's, a framework's. One file an exporter."""

from autotune.export.base import Export, Exporter
from autotune.export.discovery import export, exporters, of_result

__all__ = ["Export", "Exporter", "export", "exporters", "of_result"]
