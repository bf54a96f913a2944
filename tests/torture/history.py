"""What happened to the locks of one backend, put together from the logs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

from tests.torture.log import Event

#: Faults that end the sessions of a server, and the holds that hang on them.
SESSIONS_END = ("restart", "crash", "terminate")
#: Faults during which a server does not answer.
SERVER_AWAY = ("restart", "crash", "pause")


@dataclasses.dataclass
class Process:
    pid: int
    killed: float | None = None
    """When it was killed by the nemesis."""
    last: float = -math.inf
    """When it wrote for the last time."""
    down: bool = False


@dataclasses.dataclass
class Try:
    """One request for a lock, and the section that it led to, if it did."""

    process: Process
    n: int
    key: str
    wait: float | None
    asked: float
    answer: str | None = None
    """"enter", "refused", "failed", or None: none was written down."""
    answered: float = math.inf
    why: str = ""
    token: int | None = None
    sent: float | None = None
    """When the request was sent that won."""
    renewed: list[float] = dataclasses.field(default_factory=list)
    """When the requests were sent that prolonged the lease."""
    believed: float | None = None
    """When it last believed in its lock; None: never."""
    doubted: float = math.inf
    """When it first knew that its lock was lost."""
    told: float | None = None
    """When the signal of the loss came."""
    ended: float | None = None
    left: float | None = None
    how: str | None = None
    forked: bool = False
    children_gone: float | None = None

    def __str__(self) -> str:
        return f"{self.key} by {self.process.pid}/{self.n} token {self.token}"

    def lease_end(self, ttl: float) -> float:
        """When its lease ends at the latest: counted from the last successful request, which is before the server's."""
        return max([self.asked if self.sent is None else self.sent, *self.renewed]) + ttl


@dataclasses.dataclass
class Fault:
    kind: str
    t0: float
    t1: float
    pid: int | None = None
    """Of the worker that it was done to."""
    server: str | None = None
    keys: list[str] | None = None
    """Of the locks that it hits; None: of all at the server."""
    token: int | None = None
    result: bool = True

    @classmethod
    def of(cls, event: Event) -> Fault:
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in event.items() if name in names})


@dataclasses.dataclass
class History:
    """The tries of one backend in the order in which they were made, and what was done to it."""

    processes: dict[int, Process] = dataclasses.field(default_factory=dict)
    tries: list[Try] = dataclasses.field(default_factory=list)
    faults: list[Fault] = dataclasses.field(default_factory=list)
    wrote: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    """Key and token of guarded transactions that were committed, as those who did it say."""
    register: list[tuple[str, int]] = dataclasses.field(default_factory=list)
    """The same as the database says, in the order of the commits."""
    children: list[Event] = dataclasses.field(default_factory=list)
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    lag: float = 0.0
    """How much later than it should a sleep ended, at most, in seconds: how loaded the machine was."""

    @property
    def sections(self) -> list[Try]:
        return [each for each in self.tries if each.answer == "enter"]

    def stopped(self, pid: int, since: float, until: float) -> float:
        """For how long that process was stopped between the two moments."""
        stops = [each for each in self.faults if each.kind == "stop" and each.pid == pid]
        return sum(max(0.0, min(each.t1, until) - max(each.t0, since)) for each in stops)


def put_together(
    logs: Iterable[list[Event]], faults: Iterable[Fault], register: Iterable[tuple[str, int]] = ()
) -> History:
    """The history of one backend from the logs of its workers, one list for each process."""
    history = History(faults=sorted(faults, key=lambda fault: fault.t0), register=list(register))
    for events in logs:
        _read_process(history, events)
    history.tries.sort(key=lambda each: each.asked)
    return history


def _read_process(history: History, events: list[Event]) -> None:
    if not events:
        return
    process = Process(next(event["pid"] for event in events if event["e"] == "up"))
    history.processes[process.pid] = process
    process.killed = next((f.t0 for f in history.faults if f.kind == "kill" and f.pid == process.pid), None)
    tries: dict[int, Try] = {}
    by_token: dict[tuple[str, int], Try] = {}
    early: dict[tuple[str, int], list[Event]] = {}
    for event in events:
        at, kind = event["t"], event["e"]
        if kind != "child":  # which is written by another process
            process.last = max(process.last, at)
        history.counts[kind] = history.counts.get(kind, 0) + 1
        mine = tries.get(event.get("n", -1))
        if kind == "try":
            tries[event["n"]] = Try(process, event["n"], event["key"], event["wait"], at)
        elif kind in ("refused", "failed"):
            mine.answer, mine.answered, mine.why = kind, at, event.get("why", "")
        elif kind == "enter":
            mine.answer, mine.answered, mine.token, mine.sent = kind, at, event["token"], event["sent"]
            by_token[mine.key, mine.token] = mine
            _believe(mine, event)
            for earlier in early.pop((mine.key, mine.token), []):  # of other threads, which were faster
                _of_hold(mine, earlier)
        elif kind in ("seen", "end"):
            if kind == "end":
                mine.ended = at
            _believe(mine, event)
        elif kind == "left":
            mine.left, mine.how, mine.why = at, event["how"], event.get("why", "")
            if mine.how == "lost":
                mine.doubted = min(mine.doubted, at)
        elif kind in ("renewed", "told"):
            hold = event["key"], event["token"]
            if hold in by_token:
                _of_hold(by_token[hold], event)
            else:
                early.setdefault(hold, []).append(event)
        elif kind == "wrote":
            history.wrote.append((event["key"], event["token"]))
        elif kind == "fork":
            mine.forked, mine.children_gone = True, None
        elif kind == "gone":
            mine.children_gone = at
        elif kind == "child":
            history.children.append(event | {"pid": process.pid})
        elif kind == "lag" and not history.stopped(process.pid, at - event["seconds"] - 1, at):
            history.lag = max(history.lag, event["seconds"])
        elif kind == "down":
            process.down = True
    history.tries += tries.values()


def _of_hold(mine: Try, event: Event) -> None:
    if event["e"] == "renewed":
        mine.renewed.append(event["sent"])
    else:
        mine.told = event["t"]
        mine.doubted = min(mine.doubted, event["t"])


def _believe(mine: Try, event: Event) -> None:
    if event["believes"]:
        mine.believed = max(mine.believed or -math.inf, event["t"])
    else:
        mine.doubted = min(mine.doubted, event["t"])
