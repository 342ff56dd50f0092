"""What probes compile is kept beside the study, and nothing of it that was cut short."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from autotune.runners import compile_cache
from autotune.runners.compile_cache import CompileCache, forget

KILLED_SEARCH = """
import os, sys
from pathlib import Path
from autotune.runners.compile_cache import CompileCache
cache = CompileCache(Path(sys.argv[1]))
cache.open()
os._exit(1)
"""


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "gpt.compiled")


def compile_into(view: Path, name: str, content: str = "code") -> None:
    (view / "ab").mkdir(exist_ok=True)
    (view / "ab" / name).write_text(content)


def names(view: Path) -> set[str]:
    return {path.name for path in view.rglob("*") if path.is_file()}


def test_what_one_process_compiled_the_next_one_finds(cache: CompileCache) -> None:
    first = cache.open()
    compile_into(first, "kernel.so")
    cache.close(first, keep=True)
    second = cache.open()
    assert names(second) == {"kernel.so"} and not first.exists()


def test_of_a_process_that_was_killed_nothing_is_kept(cache: CompileCache) -> None:
    killed = cache.open()
    compile_into(killed, "kernel.so", "ha")
    cache.close(killed, keep=False)
    assert names(cache.open()) == set()


def test_processes_at_once_disturb_each_other_in_nothing(cache: CompileCache) -> None:
    one, other = cache.open(), cache.open()
    compile_into(one, "kernel.so", "first")
    compile_into(other, "kernel.so", "second")
    compile_into(other, "more.so")
    cache.close(one, keep=True)
    assert names(other) == {"kernel.so", "more.so"}
    cache.close(other, keep=True)
    later = cache.open()
    assert names(later) == {"kernel.so", "more.so"} and (later / "ab" / "kernel.so").read_text() == "first"


def test_the_oldest_go_where_there_is_too_much(cache: CompileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "MOST_BYTES", 10)
    view = cache.open()
    for age, name in enumerate(("new.so", "middle.so", "old.so")):
        compile_into(view, name, "12345")
        os.utime(view / "ab" / name, (1e9 - age, 1e9 - age))
    user = cache.open()
    cache.close(view, keep=True)
    assert names(cache.open()) == {"new.so", "middle.so"} and names(user) == set()


def test_locks_and_halves_are_not_kept_and_the_view_of_a_dead_search_goes(cache: CompileCache) -> None:
    view = cache.open()
    compile_into(view, "kernel.lock")
    compile_into(view, ".123.tmp")
    cache.close(view, keep=True)
    subprocess.run([sys.executable, "-c", KILLED_SEARCH, view.parent], check=False)
    (left_over,) = view.parent.glob("view-*/")
    assert names(cache.open()) == set() and not left_over.exists()


def test_the_view_of_a_search_in_another_container_stays(cache: CompileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "pid_exists", lambda pid: False)  # the numbers of its processes are not known here
    view = cache.open()
    cache.close(cache.open(), keep=False)
    assert view.exists()
    cache.close(view, keep=False)
    assert [path.name for path in view.parent.iterdir()] == ["kept"]


def test_caches_are_forgotten_unless_a_process_works_in_one_of_them(tmp_path: Path) -> None:
    folder = tmp_path / "gpt.compiled"
    one, other = CompileCache(folder / "one"), CompileCache(folder / "other")
    view, ended = one.open(), other.open()
    compile_into(ended, "kernel.so")
    other.close(ended, keep=True)
    for in_use in (folder / "one", folder):
        forget(in_use)
    assert view.exists() and names(folder / "other") == {"kernel.so"}
    one.close(view, keep=True)
    forget(folder)
    assert not folder.exists()
    forget(folder)


def test_a_file_system_without_hard_links_is_copied(cache: CompileCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path, as_file: Path) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    view = cache.open()
    compile_into(view, "kernel.so")
    cache.close(view, keep=True)
    assert names(cache.open()) == {"kernel.so"}
