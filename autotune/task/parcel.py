"""What a task needs on another machine: the files of its code travel, the data that the code names has to be there.

Nothing is run to find out: the code is read. A name that is put together while it runs is not seen.
"""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.errors import TaskError
from autotune.task.source import TaskSource, imported_files
from autotune.task.usercode import is_user_file
from autotune.units import format_bytes, plural

OF_ONE_MACHINE = (  # variables that say where a process runs, and are others for each
    "*_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HOME", "PATH", "TMPDIR", "USER", "HOSTNAME", "PWD",
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_*",
)  # fmt: skip
MOST_BYTES = 256 * 2**20  # of all that travels: more is data, which belongs where each machine finds it


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """A task, ready to be sent.

    Attributes:
        source: where the task comes from here.
        files: path here -> content.
        needed: paths that the code names and that exist here: every machine must have them, too.
        environment: variables that the code names, with their values here, but for those that belong to one machine or process.
    """

    source: TaskSource
    files: Mapping[str, bytes]
    needed: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def describe(self) -> str:
        """What travels, in words: `model.py, net.py (12 KiB), and MODEL_WIDTH of the environment`."""
        size = format_bytes(sum(map(len, self.files.values())))
        names = [os.path.basename(path) for path in self.files]
        shown = ", ".join(names[:5]) + (f" and {plural(len(names) - 5, 'more file')}" if len(names) > 5 else "")
        variables = f", and {', '.join(sorted(self.environment))} of the environment" if self.environment else ""
        return f"{shown} ({size}){variables}"

    def missing(self) -> list[str]:
        """What the code needs and this machine has not."""
        return [path for path in self.needed if not os.path.exists(path)]

    def unpack(self, folder: Path) -> TaskSource:
        """The task's source on this machine: its files as they are here, where all are the same; else those sent, below `folder`.

        Raises:
            OSError: they cannot be written.
        """
        if all(map(_is_here, self.files, self.files.values())):
            return self.source

        def place(path: str) -> str:
            return f"{folder}{path}"

        for path, content in self.files.items():
            file = Path(place(path))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        holding = [entry for entry in self.source.sys_path if any(_is_below(entry, path) for path in self.files)]
        return replace(
            self.source,
            path=place(self.source.path) if self.source.path else "",
            pickled=place(self.source.pickled) if self.source.pickled else "",
            sys_path=(*map(place, holding), *self.source.sys_path),
        )


def pack(source: TaskSource) -> Parcel:
    """Everything that goes to other machines with a task.

    Raises:
        TaskError: it is too large, or cannot be pickled.
    """
    if source.live is not None:
        with tempfile.TemporaryDirectory(prefix="autotune-") as folder:
            source = source.hand_over(Path(folder))
            files = {source.pickled: Path(source.pickled).read_bytes()}
        code = [file for _, file in imported_files()]
    else:
        files, code = {}, [*_modules(Path(source.path), _folders(source))]
    texts = {text for file in code for text in _texts(file)}
    environment = {text: os.environ[text] for text in texts if text in os.environ and not _is_of_one_machine(text)}
    beside = _beside(Path(source.path), texts) if source.path else []
    files |= {str(file): file.read_bytes() for file in (*code, *beside)}
    if (size := sum(map(len, files.values()))) > MOST_BYTES:
        largest = max(files, key=lambda path: len(files[path]))
        raise TaskError(
            f"{source.label} cannot be sent to other machines: it is {format_bytes(size)}, most of it "
            f"{os.path.basename(largest)}; expected at most {format_bytes(MOST_BYTES)}: read data inside functions, from a path "
            "that each machine has"
        )
    named = {os.path.join(source.cwd, text) for text in (*texts, *environment.values()) if _looks_like_path(text)}
    needed = tuple(sorted(path for path in named - files.keys() if os.path.exists(path)))
    return Parcel(source=source, files=files, needed=needed, environment=environment)


def _is_of_one_machine(variable: str) -> bool:
    return any(fnmatch.fnmatchcase(variable, pattern) for pattern in OF_ONE_MACHINE)


def _is_here(path: str, content: bytes) -> bool:
    """Whether this machine has a file with this content at the same place, as on a shared file system."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").digest() == hashlib.sha256(content).digest()
    return False


def _is_below(folder: str, path: str) -> bool:
    return path.startswith(os.path.join(folder, ""))


def _folders(source: TaskSource) -> list[Path]:
    """Where the model file's imports are looked for."""
    entries = map(Path, source.sys_path)
    return [Path(source.path).resolve().parent, *(entry for entry in entries if is_user_file(str(entry / "module.py")))]


def _modules(model: Path, folders: list[Path]) -> Iterator[Path]:
    """The model file and the user's own modules that it imports, those that these import, and so on."""
    seen, waiting = {model}, [model]
    while waiting:
        file = waiting.pop()
        yield file
        for name, parents in _imports(file):
            found = {path for parent in parents or folders for path in _files_of(name, parent)}
            waiting += sorted(path for path in found - seen if is_user_file(str(path)))
            seen |= found


def _imports(file: Path) -> Iterator[tuple[str, list[Path]]]:
    """The modules that a file may import, each with the folder that it is in, where it is relative."""
    for node in ast.walk(_parse(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = [file.parents[node.level - 1]] if node.level else []
            module = node.module or ""
            yield from ((f"{module}.{alias.name}".strip("."), parents) for alias in node.names)


def _files_of(name: str, folder: Path) -> Iterator[Path]:
    """The files below a folder that importing a module of a dotted name runs; the last part may be a name in a module."""
    place = folder
    for part in name.split("."):
        place = place / part
        yield from (file for file in (place.with_suffix(".py"), place / "__init__.py") if os.path.isfile(file))


def _texts(file: Path) -> set[str]:
    """The texts of a line that stand in a file's code."""
    values = (node.value for node in ast.walk(_parse(file)) if isinstance(node, ast.Constant))
    return {value for value in values if isinstance(value, str) and value and not set("\n\0") & set(value)}


def _parse(file: Path) -> ast.Module:
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # told by the import itself
        return ast.Module(body=[], type_ignores=[])


def _beside(model: Path, texts: set[str]) -> Iterator[Path]:
    """The files below the model file's folder that its code names: small ones travel, as Python's own do."""
    for text in sorted(texts):
        file = model.parent / text
        if not os.path.isabs(text) and file.suffix and os.path.isfile(file) and file.stat().st_size <= MOST_BYTES:
            yield file


def _looks_like_path(text: str) -> bool:
    """Whether a text is more than a word that happens to be a folder's name, too."""
    return os.sep in text or bool(os.path.splitext(text)[1])
