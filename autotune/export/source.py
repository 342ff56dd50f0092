"""Functions and classes of this package, or of another that extends it, as source text that stands by itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec, resolve_name
from pathlib import Path

from autotune.plugins import OWN

_TYPE_IGNORE = re.compile(r"  # type: ignore\[[^]]*\]")
_TORCH = "torch"  # imported by whoever uses the text, at its top


class Source:
    """Collects definitions, each once and after what it needs of others, and the imports that they need.

    Where a definition imports from a package whose source is collected, what it names is collected instead.

    Attributes:
        definitions: name -> source.
        imports: `import os`, or `from typing` -> what is imported from there.
    """

    def __init__(self) -> None:
        self.definitions: dict[str, str] = {}
        self.imports: dict[str, set[str]] = {}
        self._owners: dict[str, str] = {}

    def bring(self, code: str, *modules: str) -> None:
        """Collect what `code` names and `modules` define or import."""
        for name in _names(ast.parse(code)):
            for module in modules:
                self._collect(name, _Module.named(module))

    def import_lines(self) -> Iterator[str]:
        """The imports, a line each."""
        yield from sorted(statement for statement, names in self.imports.items() if not names)
        for module, names in sorted(self.imports.items()):
            if names:
                yield f"{module} import {', '.join(sorted(names))}"

    def _collect(self, name: str, module: _Module) -> None:
        if name == _TORCH:
            return
        if name in module.own:
            self._collect(name, _Module.named(module.own[name]))
        elif name in module.imports:
            statement, imported = module.imports[name]
            self.imports.setdefault(statement, set()).update(imported)
        elif name in module.definitions:
            owner = self._owners.get(name)
            if owner is None:
                self._owners[name] = module.name
                self._define(name, module)
            elif owner != module.name:
                raise ValueError(f"both {owner} and {module.name} define {name}; rename one of the two")

    def _define(self, name: str, module: _Module) -> None:
        node = module.definitions[name]
        left_out: list[ast.stmt] = []
        for inner in ast.walk(node):
            if isinstance(inner, ast.ImportFrom) and (source := module.own_source(inner)):
                left_out.append(inner)
                for alias in inner.names:
                    self._collect(alias.name, _Module.named(source))
            elif isinstance(inner, ast.Import) and ast.unparse(inner) == f"import {_TORCH}":
                left_out.append(inner)
        for needed in _names(node):
            self._collect(needed, module)
        self.definitions[name] = module.text(node, left_out)


@dataclass(frozen=True, kw_only=True)
class _Module:
    """What a file defines and imports at its top level, `if TYPE_CHECKING` aside.

    Attributes:
        imports: name -> statement, and what a `from` statement imports.
        own: name -> the module that it is imported from, where its source is collected.
    """

    name: str
    lines: tuple[str, ...]
    definitions: dict[str, ast.stmt]
    imports: dict[str, tuple[str, list[str]]]
    own: dict[str, str]

    @staticmethod
    @cache
    def named(name: str) -> _Module:
        spec = find_spec(name)
        assert spec is not None and spec.origin is not None
        text = Path(spec.origin).read_text()
        module = _Module(name=name, lines=tuple(text.splitlines()), definitions={}, imports={}, own={})
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom):
                source = module.own_source(node)
                for alias in node.names:
                    if source:
                        module.own[alias.name] = source
                    else:
                        module.imports[alias.asname or alias.name] = f"from {node.module}", [ast.unparse(alias)]
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    bound = alias.asname or alias.name.partition(".")[0]
                    module.imports[bound] = f"import {ast.unparse(alias)}", []
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                module.definitions[node.name] = node
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    names = (inner.id for inner in ast.walk(target) if isinstance(inner, ast.Name))
                    module.definitions.update(dict.fromkeys(names, node))
        return module

    def own_source(self, node: ast.ImportFrom) -> str:
        """The module of a `from` statement, if its source is collected; else empty."""
        package = self.name.rpartition(".")[0]
        source = resolve_name("." * node.level + (node.module or ""), package) if node.level else str(node.module)
        return source if source.partition(".")[0] in (OWN, self.name.partition(".")[0]) else ""

    def text(self, node: ast.stmt, left_out: list[ast.stmt]) -> str:
        """The source of a definition with the comment above it, without some of its lines and the blank ones after them."""
        decorators = getattr(node, "decorator_list", [])
        first = min(part.lineno for part in (node, *decorators)) - 1
        while first > 0 and self.lines[first - 1].startswith("#"):
            first -= 1
        gone = {number for inner in left_out for number in range(inner.lineno - 1, inner.end_lineno or inner.lineno)}
        kept: list[str] = []
        for number in range(first, node.end_lineno or node.lineno):
            line = self.lines[number]
            if number in gone or (not line and number - 1 in gone):
                gone.add(number)
            else:
                kept.append(_TYPE_IGNORE.sub("", line))
        return "\n".join(kept)


def _names(node: ast.AST) -> list[str]:
    return list(dict.fromkeys(inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)))
