"""What the documentation says is so: links lead somewhere, names exist, and the examples run as they stand there.

A block of Python after the comment ``<!-- not run: why -->`` is only compiled, and so are the pages that have tests of
their own. All else is executed, with the stand-ins below for what belongs to the reader's project.
"""

import ast
import asyncio
import importlib
import inspect
import io
import re
import shlex
import sys
import types
import unittest
from pathlib import Path
from unittest import mock

import pytest
from django.core.management import load_command_class
from django.core.management.base import BaseCommand
from django.test import override_settings
from django.utils.module_loading import import_string

import angee_jobs.locks
import angee_jobs.locks.testing
from angee_jobs.locks import LockBackendError, lock, task_lock, task_lock_is_held
from angee_jobs.locks.backends.base import BaseLockBackend
from tests import guarantees
from tests.docs.docpages import PAGES, ROOT, Block, blocks

LOCAL = {"BACKEND": "angee_jobs.locks.LocalLockBackend"}
#: Where a page's own test runs its examples.
TESTED_ELSEWHERE = {"tutorial.md": "test_tutorial", "operations.md": "test_signals_recipes"}
HOW_TOS = [page for page in PAGES if page.parent.name == "howto"]
#: Examples for programs that the tests of those pages' integrations run.
ONLY_COMPILED = {"celery.md", "django-tasks.md", "handoff.md", "rq-dramatiq-huey.md"}

PRELUDE = """
import asyncio, fcntl, hashlib, math, os
from datetime import timedelta
from pathlib import Path
from unittest import mock
from django.core.management.base import BaseCommand
from django.db import connection, transaction
from django.db.models import F
from django.test import TestCase, TransactionTestCase
from angee_jobs.locks import *
from angee_jobs.locks.testing import LocalLocksMixin, assert_locked, held_by_other, lose
"""


def python_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks(page, "python")]


def compiled(block: Block) -> types.CodeType:
    text = "\n" * (block.line - 1) + block.text  # so that a traceback names the line of the page
    return compile(text, str(block.page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("block", python_blocks(), ids=str)
def test_examples_compile_and_import_what_exists(block):
    compiled(block)
    for node in ast.walk(ast.parse(block.text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("angee_jobs"):
            path = ROOT / node.module.replace(".", "/")
            if "integrations" in node.module and not is_importable(node.module):
                assert path.with_suffix(".py").is_file()
                continue
            module = importlib.import_module(node.module)
            for name in node.names:
                assert hasattr(module, name.name), f"{node.module} has no {name.name}"


def docstrings() -> dict[str, str]:
    found = {}
    for module in (angee_jobs.locks, angee_jobs.locks.testing):
        for name in module.__all__:
            thing = getattr(module, name)
            if inspect.isclass(thing):
                members = ((f"{name}.{each}", member) for each, member in vars(thing).items() if each[0] != "_")
            else:
                members = ()
            for path, member in ((name, thing), *members):
                text = inspect.cleandoc(getattr(member, "__doc__", None) or "")
                if "Example::" in text:
                    found[path] = text.split("Example::", 1)[1]
    return found


@pytest.mark.parametrize("name", docstrings())
def test_examples_in_docstrings_compile(name):
    lines = []
    for line in docstrings()[name].splitlines():
        if line and not line.startswith(" "):
            break  # the text goes on
        lines.append(f"    {line}")
    compile("\n".join(["async def example():", *lines]), name, "exec")


def is_importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:  # the queue that it is for is not installed
        return False
    return True


BILLING = """
from angee_jobs.locks import lock

def send(bill): pass

def run_billing():
    with lock("billing-run") as held:
        for bill in range(3):
            held.check()
            send(bill)
"""


@pytest.fixture
def shop(monkeypatch):
    """The reader's project, as far as the examples use it."""
    package, billing = types.ModuleType("shop"), types.ModuleType("shop.billing")
    package.billing = billing
    monkeypatch.setitem(sys.modules, "shop", package)
    monkeypatch.setitem(sys.modules, "shop.billing", billing)
    exec(BILLING, vars(billing))
    return package


@pytest.fixture
def names(shop):
    """The globals of an example."""
    names = {"__name__": "example"}
    exec(PRELUDE, names)

    async def asend(batch):
        pass

    async def abatches():
        for batch in range(2):
            yield batch

    stand_ins = {name: mock.MagicMock(name=name) for name in ("Report", "Shelf", "MyStorage", "report", "task")}
    app = types.SimpleNamespace(task=lambda *args, **options: args[0] if args else lambda function: function)
    return names | stand_ins | {
        "DATABASES": {"default": {}},
        "INSTALLED_APPS": [],
        "OnceTask": None,
        "app": app,
        "batch": 1,
        "batches": [1, 2],
        "import_everything": lambda: None,
        "pytest": mock.MagicMock(name="pytest"),
        "run_billing": lambda: None,
        "run_nightly": lambda: None,
        "save": lambda batch: None,
        "tenant_id": 7,
        "a": 1,
        "b": 2,
        "task": lambda function: function,
        "text": "",
    }  # fmt: skip


RUN = [
    block
    for block in python_blocks()
    if block.page.name not in TESTED_ELSEWHERE.keys() | ONLY_COMPILED and not block.comment.startswith("not run")
]


@pytest.mark.parametrize("block", RUN, ids=str)
def test_examples_run(block, names, monkeypatch):
    if block.page.name == "async.md":
        monkeypatch.setitem(names, "batches", abatches)
        for name in ("send", "work"):
            monkeypatch.setitem(names, name, anything)
    aliases = ("default", "leases", "redis")
    with override_settings(ANGEE_JOBS_LOCKS=dict.fromkeys(aliases, LOCAL)):
        result = eval(compiled(block), names)
        if inspect.iscoroutine(result):
            asyncio.run(result)
        for alias in aliases:
            assert [*angee_jobs.locks.held_locks(backend=alias)] == [], "the example leaves a lock behind"
    if "ANGEE_JOBS_LOCKS" in names:
        for entry in names["ANGEE_JOBS_LOCKS"].values():
            fits(entry)


async def anything(*args):
    pass


async def abatches():
    for batch in range(2):
        yield batch


def fits(entry):
    """The class exists, and takes these options."""
    if entry["BACKEND"].startswith("shop."):
        return
    backend = import_string(entry["BACKEND"])
    inspect.signature(backend).bind(**entry.get("OPTIONS", {}))
    assert entry.keys() <= {"BACKEND", "NAMESPACE", "OPTIONS"}


def test_the_example_of_a_backend_works(names, shop, tmp_path):
    example = next(blocks(ROOT / "docs" / "howto" / "backend.md", "python"))
    shop.locks = types.ModuleType("shop.locks")
    vars(shop.locks).update(names)
    exec(compiled(example), vars(shop.locks))
    entry = {"BACKEND": "shop.locks.FileLockBackend", "OPTIONS": {"directory": str(tmp_path)}}
    with (
        mock.patch.dict(sys.modules, {"shop.locks": shop.locks}),
        override_settings(ANGEE_JOBS_LOCKS={"default": entry}),
    ):
        with task_lock("billing-run") as acquired:
            assert acquired
            assert task_lock_is_held("billing-run")
            with task_lock("billing-run") as second:
                assert not second
        assert not task_lock_is_held("billing-run")
        tmp_path.joinpath("gone").touch()
        with mock.patch.object(shop.locks.FileLockBackend, "try_acquire", side_effect=OSError), lock_fails():
            lock("billing-run").acquire()


def lock_fails():
    return pytest.raises(LockBackendError)


def test_the_example_of_a_test_class_passes(names, shop):
    page = ROOT / "docs" / "howto" / "testing.md"
    example = next(block for block in blocks(page, "python") if "class BillingTest" in block.text)
    exec(compiled(example), names)
    case = names["BillingTest"]
    names["run_billing"] = shop.billing.run_billing
    log = io.StringIO()
    result = unittest.TextTestRunner(log).run(unittest.defaultTestLoader.loadTestsFromTestCase(case))
    assert result.testsRun == 4
    assert result.wasSuccessful(), log.getvalue()


# Links


def headings(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    found = re.findall(r"^#+ +(.+?) *$", text, re.M)
    # As GitHub and MyST make anchors of headings.
    return {
        re.sub(r"[^\w\- ]", "", heading.lower().replace("_", "-") if False else heading.lower()) for heading in found
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^[ ]*```.*?^[ ]*```$", "", page.read_text(), flags=re.M | re.S)
    text = re.sub(r"`[^`\n]*`", "", text)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {target}"
        if anchor:
            anchors = {heading.replace(" ", "-") for heading in headings(there)}
            assert anchor in anchors or anchor.replace("-", "_") in anchors, f"{page.name} links to {target}"


# Commands


def commands() -> list[tuple[str, str]]:
    pattern = r"manage\.py (list_locks|release_lock|reap_locks|run_locked)((?: +[^\s`\[&|;<]+)+)"
    return [match for page in PAGES for match in re.findall(pattern, page.read_text())]


@pytest.mark.parametrize(("name", "arguments"), commands())
def test_commands_take_the_arguments_that_are_shown(name, arguments):
    words = shlex.split(arguments.partition(" -- ")[0])  # what comes after it belongs to the program
    if "KEY" not in words:
        load_command_class("angee_jobs", name).create_parser("manage.py", name).parse_args(words)


# Completeness


def test_every_public_name_is_in_the_reference():
    reference = ROOT / "docs" / "reference"
    text = (reference / "locks.md").read_text() + angee_jobs.locks.signals.__doc__
    for name in angee_jobs.locks.__all__:
        assert re.search(rf"\b{name}\b", text), name
    text = (reference / "testing.md").read_text()
    for name in angee_jobs.locks.testing.__all__:
        assert re.search(rf"\b{name}\b", text), name
    for name, meaning in angee_jobs.locks.testing.CAPABILITIES.items():
        assert f"| `{name}` | {meaning} |" in text
    text = (reference / "backend.md").read_text()
    for name, member in vars(BaseLockBackend).items():
        if name[0] != "_" and name not in {"info", "try_acquire", "is_held"}:
            assert re.search(rf"\b{name}\b", text), f"{name}: {member}"


@pytest.mark.parametrize("name", ["list_locks", "reap_locks", "release_lock", "run_locked"])
def test_every_option_of_a_command_is_on_its_page(name):
    _, page = (ROOT / "docs" / "operations.md").read_text().split(f"\n### {name}\n")
    page = re.split(r"\n##+ ", page)[0]
    plain = BaseCommand().create_parser("manage.py", name)
    of_django = {option for action in plain._actions for option in action.option_strings}
    for action in load_command_class("angee_jobs", name).create_parser("manage.py", name)._actions:
        for option in set(action.option_strings) - of_django:
            assert f"`{option}" in page or f"[{option} " in page, option


def test_every_module_is_in_the_architecture():
    """Each module of the policy by its name, each engine by its package."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "angee_jobs"
    named = [*package.glob("*.py"), *package.glob("locks/*.py"), *package.glob("locks/backends/*.py")]
    named += [*package.glob("admin/*.py"), *package.glob("management/*.py"), *package.glob("integrations/*.py")]
    for module in named:
        assert f"{module.name}`" in text or module.name == "__init__.py", module
    for engine in (package / "locks" / "backends").iterdir():
        assert engine.is_file() or engine.name.startswith("__") or f"`{engine.name}/`" in text, engine
    for name in re.findall(r"`(?:[a-z]+/)*(\w+\.py)`", text):
        assert list(ROOT.glob(f"angee_jobs/**/{name}")) or list(ROOT.glob(f"tests/**/{name}")), f"{name} is gone"


def test_every_option_of_a_lock_is_in_the_reference():
    text = (ROOT / "docs" / "reference" / "locks.md").read_text()
    table = text.partition("### Options")[2].partition("```")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.M)
    options = [name for name in inspect.signature(lock).parameters if name != "key"]
    assert rows == options


def test_every_page_is_within_reach():
    """A how-to stands in the lists of what people do, and each page in the menu."""
    index, readme = (ROOT / "docs" / "index.md").read_text(), (ROOT / "README.md").read_text()
    assert "\ndecisions/*\n" in index
    for page in (ROOT / "docs").rglob("*.md"):
        name = str(page.relative_to(ROOT / "docs").with_suffix(""))
        if not name.startswith(("decisions/", "_build/", "index")):
            assert f"\n{name}\n" in index, name
        if name.startswith("howto/"):
            assert f"]({name}.md)" in index, name
            assert f"](docs/{name}.md)" in readme, name


@pytest.mark.parametrize("page", HOW_TOS, ids=lambda page: page.stem)
def test_a_how_to_defines_the_aliases_that_it_uses(page):
    text = page.read_text()
    used = set(re.findall(r"""backend(?:="|[ =])(\w+)\b""", "\n".join(block.text for block in blocks(page))))
    defined = set(re.findall(r'^ *"(\w+)": \{\s*"BACKEND"', text, re.M)) | {"default", "mine"}
    assert used <= defined


def test_the_guarantees_name_tests_that_exist():
    known = {name for names in guarantees.contract_tests().values() for name in names}
    text = guarantees.PAGE.read_text()
    for name in re.findall(r"^- `(test_\w+)`$", text, re.M):
        assert name in known, f"{name} is gone: python -m tests.guarantees"
    for path in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (ROOT / path).is_file(), path
