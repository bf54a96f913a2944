"""A patch of a module's name that nobody reads there tests nothing: the name has moved, and the test still passes."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("angee_jobs/locks/testing/**/*.py"), *ROOT.glob("benchmarks/*.py")]
OURS = ("angee_jobs", "testproject", "tests")
PATCHES = ("setattr", "patch", "object", "_patch")


def imported(tree: ast.AST, package: str) -> dict[str, str]:
    """The dotted path that each imported name of a module stands for."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom):
            parent = package.rsplit(".", node.level - 1)[0] if node.level else ""
            origin = ".".join(filter(None, (parent, node.module)))
            found |= {alias.asname or alias.name: f"{origin}.{alias.name}" for alias in node.names}
    return found


def patches(path: Path) -> Iterator[tuple[int, str, str]]:
    """The line, the module and the name of each patch of one of our modules."""
    tree = ast.parse(path.read_text())
    package = ".".join(path.relative_to(ROOT).parent.parts)
    names = imported(tree, package)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or len(node.args) < 1:
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called not in PATCHES:
            continue
        first = node.args[0]
        if isinstance(first, ast.Constant) and isinstance(first.value, str):  # "module.NAME"
            module, _, name = first.value.rpartition(".")
        elif isinstance(first, ast.Name) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            module, name = names.get(first.id, ""), node.args[1].value
        else:
            continue
        if module.startswith(OURS):
            yield node.lineno, module, name


def reads(module: types.ModuleType, name: str) -> bool:
    """Whether the module itself uses what its name stands for, or another module looks it up there."""
    tree = ast.parse(inspect.getsource(module))
    if any(isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load) for n in ast.walk(tree)):
        return True
    last = module.__name__.rpartition(".")[2]
    return any(
        f"{alias}.{name}" in text
        for text in package()
        for alias in [last, *re.findall(rf"import {last} as (\w+)", text)]
    )


@functools.cache
def package() -> list[str]:
    return [path.read_text() for path in ROOT.glob("angee_jobs/**/*.py")]


def as_module(name: str) -> types.ModuleType | None:
    try:
        return importlib.import_module(name)
    except ImportError:  # a class or an instance
        return None


@pytest.mark.once
def test_what_a_test_patches_is_read_where_it_is_patched() -> None:
    found = {(module, name): f"{path.name}:{line}" for path in SOURCES for line, module, name in patches(path)}
    assert len(found) > 20
    for (module_name, name), where in found.items():
        module = as_module(module_name)
        if module is not None:
            assert reads(module, name), f"{where} patches {module_name}.{name}, which nothing reads there"


def test_a_patch_of_a_name_that_has_moved_is_found(tmp_path: Path) -> None:
    [base] = [m for m in pkgutil.iter_modules([str(ROOT / "angee_jobs/locks/backends")]) if m.name == "base"]
    module = importlib.import_module(f"angee_jobs.locks.backends.{base.name}")
    assert not reads(module, "_host")
    assert reads(module, "HIDDEN")
