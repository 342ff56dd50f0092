"""The sample study of the reports."""

from tests.report.conftest import empty, study

__all__ = ["empty", "study"]
