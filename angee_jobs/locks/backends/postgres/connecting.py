"""Which hosts to connect to, one after another, and their addresses: found out on a thread, within a deadline.

libpq looks up names and reads files (passwords, services, certificates) inside calls that know no deadline and keep
every other thread from running: a name server that did not answer stopped the whole process for ten seconds, and its
leases at other servers were lost. So libpq is given addresses, and files that could be read a moment ago.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from django.core.exceptions import ImproperlyConfigured

from ... import clock, process
from .errors import NoAnswer, SessionLost
from .parameters import connection_parameters

T = TypeVar("T")

#: At most so many threads are kept by one host name, or by the files of one alias, that gives no answer.
THREADS = 4
_under_way: dict[object, str] = {}

#: What libpq reads besides, with its default in the home directory.
_FILES = {
    "passfile": ".pgpass",
    "sslcert": ".postgresql/postgresql.crt",
    "sslkey": ".postgresql/postgresql.key",
    "sslrootcert": ".postgresql/root.crt",
    "sslcrl": ".postgresql/root.crl",
}


class Host(NamedTuple):
    """One host of an alias, with all parameters for libpq."""

    alias: str
    #: What is to be looked up; empty for a socket's path or an address.
    name: str
    parameters: dict[str, Any]

    def addresses(self, deadline: float) -> list[bytes]:
        """A connection string for each address of the host."""
        name, parameters = self.name, self.parameters
        if not name:
            return [_conninfo(self.alias, parameters)]

        def look_up() -> list[str]:
            # Bytes, or Python would refuse names that libpq takes, such as those with an underscore at their end.
            found = socket.getaddrinfo(name.encode(), None, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(address[4][0]) for address in found))

        try:
            addresses = on_thread(name, look_up, deadline)
        except NoAnswer:
            raise NoAnswer(f"the address of {name!r} was not found in time", sent=False) from None
        except (OSError, UnicodeError) as error:
            raise SessionLost(f"the address of {name!r} could not be found: {error}", sent=False) from error
        if parameters.get("load_balance_hosts") == "random":
            random.shuffle(addresses)
        return [_conninfo(self.alias, parameters | {"hostaddr": address}) for address in addresses]


def hosts_of(
    alias: str, extra: dict[str, str], forced: dict[str, str], deadline: float
) -> tuple[list[Host], str | None]:
    """The hosts of ``alias`` in the order in which they are to be tried, and the role to assume there."""

    def look_up() -> tuple[list[Host], str | None]:
        parameters, role = connection_parameters(alias)
        given = extra | parameters | forced
        in_effect = _in_effect(given)
        if in_effect("gssencmode") == "prefer" and not in_effect("gssencmode", default=False):
            # Asking Kerberos for a ticket has no deadline either; who wants its encryption says so.
            given["gssencmode"] = "disable"
        _read_files(in_effect)
        return [*_hosts(alias, given, in_effect)], role

    try:
        return on_thread(alias, look_up, deadline)
    except NoAnswer:
        raise NoAnswer("the files with its passwords or certificates were not read in time", sent=False) from None
    except OSError as error:
        raise SessionLost(str(error), sent=False) from error


def shares(items: Sequence[T], deadline: float) -> Iterator[tuple[T, float]]:
    """Each item with a deadline of its own: an equal part of the time that is left."""
    for number, item in enumerate(items):
        now = clock.now()
        yield item, now + (deadline - now) / (len(items) - number)


def on_thread(what: str, work: Callable[[], T], deadline: float) -> T:
    """The result of ``work``, which may take for ever, on a thread of its own; NoAnswer if it is not there in time."""
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        mine = object()
        _under_way[mine] = what
        try:
            answers.put((work(), None))
        except BaseException as error:
            answers.put((None, error))
        finally:
            _under_way.pop(mine, None)

    while [*_under_way.values()].count(what) >= THREADS:
        if clock.now() >= deadline:
            raise NoAnswer(sent=False)
        time.sleep(0.01)
    if not process.start_thread(run, "angee-locks-connect"):
        run()  # at the interpreter's exit, where leases are released
    try:
        result, error = answers.get(timeout=min(max(deadline - clock.now(), 0.0), threading.TIMEOUT_MAX))
    except queue.Empty:
        raise NoAnswer(sent=False) from None
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


process.on_fork(in_child=_under_way.clear)


def _in_effect(given: Mapping[str, Any]) -> Callable[..., str]:
    """What counts for libpq: a parameter, the service's, the environment's, or libpq's own default."""
    from psycopg import pq

    options = {option.keyword.decode(): option for option in pq.Conninfo.parse(b"")}
    service = given.get("service") or os.environ.get("PGSERVICE")
    of_service = _read_service(str(service)) if service else {}

    def in_effect(keyword: str, default: bool = True) -> str:
        option = options.get(keyword)
        value = given.get(keyword)
        if value is None:
            value = of_service.get(keyword)
        if value is None and option is not None:
            value = os.environ.get((option.envvar or b"").decode())
            if value is None and default:
                value = (option.compiled or b"").decode()
        return str(value or "")

    return in_effect


def _read_service(name: str) -> dict[str, str]:
    places = [os.environ.get("PGSERVICEFILE") or _at_home(".pg_service.conf")]
    if directory := os.environ.get("PGSYSCONFDIR"):
        places.append(os.path.join(directory, "pg_service.conf"))
    for place in places:
        found: dict[str, str] | None = None
        with contextlib.suppress(OSError), open(place, encoding="utf-8", errors="surrogateescape") as file:
            for line in map(str.strip, file):
                if line.startswith("["):
                    if found is not None:
                        break
                    found = {} if line == f"[{name}]" else None
                elif found is not None and "=" in line and not line.startswith("#"):
                    keyword, _, value = line.partition("=")
                    found[keyword] = value
        if found is not None:
            return found
    return {}


def _read_files(in_effect: Callable[..., str]) -> None:
    """What hangs for ever, as on a dead mount, does so here and not in libpq."""
    for keyword, default in _FILES.items():
        path = in_effect(keyword) or _at_home(default)
        with contextlib.suppress(OSError, ValueError):
            if stat.S_ISREG(os.stat(path).st_mode):
                with open(path, "rb", buffering=0) as file:
                    file.read(1)


def _at_home(path: str) -> str:
    return os.path.join(os.path.expanduser("~"), path)


def _hosts(alias: str, given: dict[str, Any], in_effect: Callable[..., str]) -> Iterator[Host]:
    """libpq would stay with the first of several hosts for as long as that is silent: it is told of each alone."""
    names, addresses, ports = (in_effect(keyword).split(",") for keyword in ("host", "hostaddr", "port"))
    count = max(len(names), len(addresses))
    columns = [
        values * count if values == [""] or (values is ports and len(values) == 1) else values
        for values in (names, addresses, ports)
    ]
    if any(len(values) != count for values in columns) or not any(names + addresses):
        yield Host(alias, "", given)  # the default, or an error that libpq explains
        return
    places = [*zip(*columns, strict=True)]
    if in_effect("load_balance_hosts") == "random":
        random.shuffle(places)
    wanted = in_effect("target_session_attrs")
    for target in ("standby", "any") if wanted == "prefer-standby" else (wanted,):
        for name, address, port in places:
            own = {"host": name, "hostaddr": address, "port": port or "5432", "target_session_attrs": target}
            parameters = given | {keyword: value or None for keyword, value in own.items()}
            yield Host(alias, "" if address or _is_known(name) else name, parameters)


def _is_known(name: str) -> bool:
    """Whether this is the path of a socket, or an address."""
    with contextlib.suppress(OSError, UnicodeError):
        return (
            not name
            or name[0] in "/@"
            or ":\\" in name
            or bool(socket.getaddrinfo(name.encode(), None, flags=socket.AI_NUMERICHOST))
        )
    return False


def _conninfo(alias: str, parameters: dict[str, Any]) -> bytes:
    from psycopg import Error, conninfo

    try:
        return conninfo.make_conninfo("", **parameters).encode()
    except Error as error:
        raise ImproperlyConfigured(f"The database {alias!r} cannot be connected to: {error}") from error
