"""A process in a container of its own, as far as `unshare` makes one: takes, holds and looks at locks as it is told.

`python -m tests.support.children.sqlite_box DATABASE` needs no settings. Each line it hears is a command.
"""

import sys

from tests.support.children import hear, say


def main(database: str) -> None:
    import django
    from django.conf import settings

    settings.configure(
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": database}},
        INSTALLED_APPS=["angee_jobs"],
        ANGEE_JOBS_LOCKS={"default": {"BACKEND": "angee_jobs.locks.TableLockBackend"}},
    )
    django.setup()
    from django.core.checks import run_checks

    from angee_jobs.locks import LockBackendError, lock

    held = lock("boxed", ttl=30)
    say("ready")
    while (line := hear()) != "end":
        try:
            if line == "acquire":
                say("acquired", held.acquire())
            elif line == "release":
                say("released", held.release())
            elif line == "check":
                say("checked", *sorted(problem.id or "" for problem in run_checks()))
        except LockBackendError as error:
            say("error", error)


if __name__ == "__main__":
    main(*sys.argv[1:])
