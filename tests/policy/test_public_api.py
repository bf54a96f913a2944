"""The public names and how they are called, as they were when somebody last meant to change them.

A change that breaks callers needs a new version, so it must not happen by accident. When it is meant::

    python -m tests.policy.test_public_api > tests/public_api.txt
"""

import inspect
from collections.abc import Iterator
from pathlib import Path

import django.dispatch

import angee_jobs.locks
import angee_jobs.locks.testing

PINNED = Path(__file__).parents[1] / "public_api.txt"


def signature(function: object) -> str:
    """Names, kinds and defaults of the parameters: annotations are for type checkers."""
    whole = inspect.signature(function)
    parameters = [each.replace(annotation=inspect.Parameter.empty) for each in whole.parameters.values()]
    return str(whole.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


def members(cls: type) -> Iterator[str]:
    """The public methods and attributes that come from this package, those of its base classes too."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("angee_jobs.")]
    for name in sorted({name for base in ours for name in vars(base) if not name.startswith("_")}):
        member = inspect.getattr_static(cls, name)
        if isinstance(member, classmethod):
            member = member.__func__
        yield f"    .{name}{signature(member) if inspect.isfunction(member) else ''}"


def described() -> Iterator[str]:
    for module in (angee_jobs.locks, angee_jobs.locks.testing):
        yield module.__name__
        for name in sorted(module.__all__):
            thing = getattr(module, name)
            if isinstance(thing, django.dispatch.Signal):
                yield f"  {name}: signal"
            elif inspect.isclass(thing) and name in {"LockContract", "ContractCase"}:
                yield f"  {name}: tests"
            elif inspect.isclass(thing):
                protocol = getattr(thing, "_is_protocol", False)
                yield f"  {name}{'' if protocol else signature(thing)}"
                if not name.endswith("LockBackend"):  # what a lock needs of a backend is in backends/base.py
                    yield from members(thing)
            elif inspect.isroutine(thing):
                yield f"  {name}{signature(thing)}"
            else:
                yield f"  {name}"


def test_the_public_names_are_what_they_were():
    assert list(described()) == PINNED.read_text().splitlines()


if __name__ == "__main__":
    print("\n".join(described()))
