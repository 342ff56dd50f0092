"""The sample study, written once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune.study.reading import Study, load_study
from tests.report.sample_study import write_study


@pytest.fixture(scope="session")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return load_study(write_study(tmp_path_factory.mktemp("sample") / "gpt.db"))


@pytest.fixture(scope="session")
def unanswered(study: Study) -> Study:
    """A study whose search has not come to an answer."""
    return replace(study, result=None)


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A study without a finished probe."""
    return load_study(write_study(tmp_path_factory.mktemp("empty") / "gpt.db", with_probes=False, with_result=False))
