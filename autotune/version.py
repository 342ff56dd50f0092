"""The package's version, which studies and tables record."""

__version__ = "0.1.0"
