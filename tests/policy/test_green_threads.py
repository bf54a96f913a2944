"""gevent and eventlet: refused, where they have replaced threads."""

import subprocess
import sys
import types

import pytest
from django.core.exceptions import ImproperlyConfigured

from angee_jobs.locks import conf, lock_backends, task_lock
from tests.support.procs import ROOT
from tests.support.servers import missing_packages

PATCHES = {
    "gevent": "from gevent import monkey; monkey.patch_all()",
    "eventlet": "import eventlet; eventlet.monkey_patch()",
}
PROGRAM = """
import sys
{patch}
from django.conf import settings
settings.configure(ANGEE_JOBS_LOCKS={{"default": {{"BACKEND": "angee_jobs.locks.LocalLockBackend"}}}})
from angee_jobs.locks import task_lock
from django.core.exceptions import ImproperlyConfigured
try:
    with task_lock("key"):
        print("entered")
except ImproperlyConfigured as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("library", PATCHES)
def test_refused_after_patching(library):
    if reason := missing_packages(library):
        pytest.skip(reason)
    program = PROGRAM.format(patch=PATCHES[library])
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert f"{library} has replaced the threads" in ran.stdout, ran.stdout + ran.stderr


@pytest.mark.parametrize(
    ("module", "function", "library"),
    [("gevent.monkey", "is_module_patched", "gevent"), ("eventlet.patcher", "is_monkey_patched", "eventlet")],
)
@pytest.mark.parametrize("patched", [True, False])
def test_by_what_the_libraries_say(monkeypatch, module, function, library, patched):
    stand_in = types.SimpleNamespace(**{function: lambda what: patched and what in ("thread", "threading")})
    monkeypatch.setitem(sys.modules, module, stand_in)
    assert conf.green_threads() == (library if patched else None)
    lock_backends._forget()
    try:
        if patched:
            with pytest.raises(ImproperlyConfigured, match=rf"{library} has replaced .*prefork or threads pool"):
                task_lock("green", backend="local").__enter__()
        else:
            with task_lock("green", backend="local") as acquired:
                assert acquired
    finally:
        lock_backends._forget()
