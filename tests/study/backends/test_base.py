"""The kinds of storage that searches may share, and URLs without their passwords."""

from __future__ import annotations

import pytest

from autotune.study.backends import shared_backend_of, ways_to_share
from autotune.study.backends.base import secrets_of, without_password


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:////home/a:b@c/gpt.db", "sqlite:////home/a:b@c/gpt.db"),
        ("journal:////shared/gpt.log", "journal:////shared/gpt.log"),
        ("mysql+pymysql://me@host/db", "mysql+pymysql://me@host/db"),
        ("mysql+pymysql://me:se%40cret@host:33/db?ssl=1", "mysql+pymysql://me@host:33/db?ssl=1"),
        ("mysql://host/db?user=me&password=se@cret", "mysql://host/db?user=me"),
        ("mysql://me:se@cret@host:port/db", "mysql://..."),
    ],
)
def test_a_url_is_shown_without_its_password_and_else_as_it_was_given(url: str, shown: str) -> None:
    assert without_password(url) == shown and "cret" not in shown


def test_the_passwords_of_a_url_are_known() -> None:
    assert secrets_of("mysql://me:se%40cret@host/db?sslpassword=other") == ["se@cret", "other"]
    assert secrets_of("studies/gpt.db") == []


@pytest.mark.parametrize("url", ["studies/gpt.db", "sqlite:///studies/gpt.db", "mysql+pymysql://host/db"])
def test_one_search_writes_to_what_is_no_shared_storage(url: str) -> None:
    assert shared_backend_of(url) is None


def test_each_shared_storage_says_how_and_when_to_use_it() -> None:
    assert "--storage journal:////FOLDER/FILE.log (a file that all machines see" in ways_to_share()
    assert "--storage postgresql+psycopg://USER@HOST/DATABASE (a server" in ways_to_share()
