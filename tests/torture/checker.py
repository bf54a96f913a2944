"""Proves or refutes, from the logs of one backend, what is promised of its locks.

Each rule is a function of the history that yields what breaks it. Two kinds of time are told apart. That two holders
who both believe in their lock are never inside together is judged to the hundredth of a second, whatever the machine
is doing: each of them looks at its own clock before it believes. How soon something is known, or comes free, is judged
with ``slack``, which grows with what the machine was seen to delay.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from tests.torture.history import SERVER_AWAY, SESSIONS_END, Fault, History, Try

#: How exactly the clocks of the server and of this machine's processes agree, in seconds.
EXACT = 0.01
#: A session lock's loss is told within so many seconds.
SESSION_LOSS_SECONDS = 2.0
#: A lost wake-up costs a waiter so many seconds.
FALLBACK_SECONDS = 1.0
#: A request without a timeout of its own has so many seconds.
OPERATION_SECONDS = 5.0
#: How long a server may be busy with itself after it came back.
RECOVERY_SECONDS = 2.0
#: Slack for what is to happen soon, on a machine with nothing else to do, and per second of delay that was seen.
SLACK, SLACK_PER_LAG = 2.0, 3.0


@dataclasses.dataclass
class Terms:
    """What the backend promises."""

    ttl: float
    session: bool = False
    """Whether a hold hangs on a connection, and is no lease."""
    one_writer: bool = False
    """Whether a process that is stopped in the middle of a request keeps all others waiting."""


@dataclasses.dataclass
class Violation:
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


Rule = Callable[[History, Terms, float], Iterator[str]]
RULES: list[Rule] = []


def rule(function: Rule) -> Rule:
    RULES.append(function)
    return function


def slack_of(history: History) -> float:
    return SLACK + SLACK_PER_LAG * history.lag


def check(history: History, terms: Terms, leftovers: Iterable[str] = ()) -> list[Violation]:
    """Every violation of every rule; ``leftovers`` is what was found at the server when all was over."""
    slack = slack_of(history)
    found = [
        Violation(each.__name__, text.replace("\n", " ")) for each in RULES for text in each(history, terms, slack)
    ]
    return found + [Violation("leftovers", text) for text in leftovers]


def by_key(tries: Iterable[Try]) -> dict[str, list[Try]]:
    found: dict[str, list[Try]] = defaultdict(list)
    for each in tries:
        found[each.key].append(each)
    return found


# Exclusion and loss


def overlaps(history: History) -> Iterator[tuple[Try, Try, float]]:
    """Pairs of sections in which both believed at once, the older hold first, and until when they did."""
    for sections in by_key(history.sections).values():
        active: list[Try] = []
        for new in sorted(sections, key=lambda each: each.answered):
            if new.believed is None:
                continue
            active = [old for old in active if old.believed > new.answered + EXACT]
            for other in active:
                until = min(other.believed, new.believed)
                if until > new.answered + EXACT:
                    older, newer = sorted((other, new), key=lambda each: each.token)
                    yield older, newer, until
            active.append(new)


def endings(history: History, terms: Terms, section: Try) -> Iterator[tuple[Fault, float]]:
    """The faults that may have ended the hold of ``section``, and until when it may have believed in it after each.

    Without the slack, and without the time that its process was stopped.
    """
    for fault in history.faults:
        if fault.t1 < section.asked or fault.t0 > (section.believed or section.answered) + EXACT:
            continue
        if fault.kind == "force" and fault.keys == [section.key] and fault.token in (None, section.token):
            yield fault, fault.t1 + (SESSION_LOSS_SECONDS if terms.session else terms.ttl)
        elif terms.session and fault.kind in SESSIONS_END:
            # What a session held was looked up before it was ended, and so may lack what was granted meanwhile.
            meanwhile = (section.sent or section.asked) <= fault.t1 and section.answered >= fault.t0
            if fault.keys is None or section.key in fault.keys or meanwhile:
                yield fault, fault.t1 + SESSION_LOSS_SECONDS


def patience(history: History, section: Try, since: float, until: float) -> float:
    """Time between the two moments in which the holder could learn nothing: it was stopped, or its server was."""
    away = [fault for fault in history.faults if fault.kind in SERVER_AWAY]
    server = sum(max(0.0, min(each.t1, until) - max(each.t0, since)) for each in away)
    return history.stopped(section.process.pid, since, until) + server


@rule
def exclusion(history: History, terms: Terms, slack: float) -> Iterator[str]:
    """Two who believe are inside together only if a fault ended the older hold, and only until that must be known."""
    for older, newer, until in overlaps(history):
        explained = False
        for fault, limit in endings(history, terms, older):
            if fault.t0 <= newer.answered + EXACT:
                explained |= until <= limit + patience(history, older, fault.t0, until) + slack
        if not explained:
            yield f"{newer} and {older} were inside together until {until:.3f}, since {newer.answered:.3f}"


@rule
def belief(history: History, terms: Terms, slack: float) -> Iterator[str]:
    """Nobody believes in a lease after its end; to the point, since it is its own clock that says so."""
    if terms.session:
        return
    for section in history.sections:
        end = section.lease_end(terms.ttl)
        if section.believed is not None and section.believed > end + EXACT:
            yield f"{section} believed in its lease {section.believed - end:.3f} s after the end of it"


@rule
def told_in_time(history: History, terms: Terms, slack: float) -> Iterator[str]:
    """A hold that a fault has ended for certain is not believed in for longer than it takes to tell."""
    for section in history.sections:
        if section.believed is None:
            continue
        for fault, limit in endings(history, terms, section):
            certain = fault.result and fault.t0 > section.answered
            if fault.kind == "force" and fault.token is None:
                certain = False  # whose hold it was is not known
            over = section.believed - limit - patience(history, section, fault.t0, section.believed)
            if certain and over > slack:
                yield f"{section} still believed in its lock {over:.1f} s after it had to know its end by {fault.kind}"


@rule
def signalled(history: History, terms: Terms, slack: float) -> Iterator[str]:
    """Each loss is told by the signal, too, unless the process was killed before that could be."""
    for section in history.sections:
        if section.how != "lost" or section.told is not None:
            continue
        alive = (section.process.killed or section.process.last) - (section.left or 0.0)
        if alive > slack + history.stopped(section.process.pid, section.left or 0.0, section.process.last):
            yield f"{section} was lost, and there was no signal of it"


@rule
def ownership(history: History, terms: Terms, slack: float) -> Iterator[str]:
    """A release that says that it freed the lock did: nobody else had been granted it before."""
    for sections in by_key(history.sections).values():
        newer: Try | None = None  # of those with a larger token, who entered first
        for older in sorted(sections, key=lambda each: each.token, reverse=True):
            if newer and older.how == "released" and older.ended and newer.answered + EXACT < older.ended:
                yield f"{older} says that it was released at {older.ended:.3f}; {newer} entered {newer.answered:.3f}"
            if newer is None or older.answered < newer.answered:
                newer = older


@rule
def fencing(history: History, terms: Terms, slack: float) -> Iterator[str]:
    """Tokens rise: a grant that was there before another was asked for has the smaller one."""
    for sections in by_key(history.sections).values():
        for before, after in _equal_neighbours(sorted(sections, key=lambda each: each.token)):
            yield f"{before} and {after} have the same token"
        granted = sorted(sections, key=lambda each: each.answered)
        largest: Try | None = None
        at = 0
        for later in sorted(sections, key=lambda each: each.sent or each.asked):
            while at < len(granted) and granted[at].answered < (later.sent or later.asked):
                if largest is None or granted[at].token > largest.token:
                    largest = granted[at]
                at += 1
            if largest is not None and largest.token > later.token:
                yield f"{later} was granted after {largest}, whose token is larger"


def _equal_neighbours(sections: list[Try]) -> Iterator[tuple[Try, Try]]:
    for before, after in itertools.pairwise(sections):
        if before.token == after.token:
            yield before, after


@rule
def register(history: History, terms: Terms, slack: float) -> Iterator[str]:
    """What is written under guard never goes backwards, and nothing that was committed is gone."""
    highest: dict[str, int] = {}
    for key, token in history.register:
        if token < highest.get(key, token):
            yield f"{key} was written with token {token} after {highest[key]}"
        highest[key] = max(token, highest.get(key, token))
    present = set(history.register)
    for key, token in history.wrote:
        if (key, token) not in present:
            yield f"{key} was written with token {token}, and it is not there"


# Answers, waiting, and holds that outlive their holders


def may_hold_until(history: History, terms: Terms, each: Try) -> float | None:
    """Until when the hold that came of this try may keep others out; None if none can have come of it."""
    killed = each.process.killed
    quick = SESSION_LOSS_SECONDS if terms.session else terms.ttl
    if each.answer == "refused":
        return None
    if each.left is None and each.answer != "failed":
        if killed is None:
            return math.inf
        if terms.session and each.forked:
            # The connection is open for as long as the child lives, which has inherited it.
            return killed + OPERATION_SECONDS
        return killed + quick
    over = each.answered if each.answer == "failed" else each.left
    assert over is not None
    if each.answer == "failed" or each.how == "failed":
        return over + OPERATION_SECONDS + quick  # it is freed behind the scenes, as soon as the server answers
    for fault in history.faults:
        # What ends a hold may be forgotten in a crash of the server: then it ends as its lease does.
        if fault.kind == "crash" and fault.t0 - RECOVERY_SECONDS <= over <= fault.t1 + RECOVERY_SECONDS:
            return max(over, each.lease_end(terms.ttl)) + RECOVERY_SECONDS
    return over


def free_times(history: History, terms: Terms, waiter: Try) -> list[tuple[float, float]]:
    """When, while it waited, the lock was free for certain, and the waiter and the server able to do something."""
    taken = []
    for each in history.tries:
        if each.key == waiter.key and each is not waiter and each.asked <= waiter.answered:
            until = may_hold_until(history, terms, each)
            if until is not None and until >= waiter.asked:
                taken.append((each.asked, until))
    for fault in history.faults:
        if fault.kind in SERVER_AWAY or fault.kind in ("full", "no memory"):
            taken.append((fault.t0, fault.t1 + RECOVERY_SECONDS))
        elif fault.kind == "stop" and (terms.one_writer or fault.pid == waiter.process.pid):
            taken.append((fault.t0, fault.t1 + FALLBACK_SECONDS))
    free, at = [], waiter.asked
    for since, until in sorted(taken):
        if since > at:
            free.append((at, min(since, waiter.answered)))
        at = max(at, until)
        if at >= waiter.answered:
            return free
    return [*free, (at, waiter.answered)]


@rule
def refused_for_a_reason(history: History, terms: Terms, slack: float) -> Iterator[str]:
    """Who is refused was kept out by somebody: no hold outlives its holder, and no release goes unheard."""
    for waiter in history.tries:
        if waiter.answer != "refused":
            continue
        for since, until in free_times(history, terms, waiter):
            if until - since > FALLBACK_SECONDS + slack:
                yield f"{waiter} was refused after waiting for a lock that was free for {until - since:.1f} s"
        if not waiter.wait and _nobody_near(history, terms, waiter, slack):
            yield f"{waiter} was refused a lock that nobody had"


def _nobody_near(history: History, terms: Terms, waiter: Try, slack: float) -> bool:
    near = dataclasses.replace(waiter, asked=waiter.asked - slack, answered=waiter.answered + slack)
    return free_times(history, terms, near) == [(near.asked, near.answered)]


@rule
def answered(history: History, terms: Terms, slack: float) -> Iterator[str]:
    """Everybody who asked got an answer, in time, unless killed; and everybody who was inside came out."""
    for each in history.tries:
        process = each.process
        limit = OPERATION_SECONDS + 1 if each.wait is None else each.wait
        if each.answer is None:
            if process.killed is None:
                yield f"{each} never got an answer"
            continue
        late = each.answered - each.asked - limit - history.stopped(process.pid, each.asked, each.answered)
        if late > slack:
            yield f"{each} got its answer {late:.1f} s late ({each.answer})"
        if each.ended is not None and each.left is not None:
            took = each.left - each.ended - history.stopped(process.pid, each.ended, each.left)
            if took > OPERATION_SECONDS + slack:
                yield f"{each} took {took:.1f} s to leave its section"
    for process in history.processes.values():
        if process.killed is None and not process.down:
            yield f"the process {process.pid} did not end by itself when it was asked to"


@rule
def children(history: History, terms: Terms, slack: float) -> Iterator[str]:
    """A forked child has no hold and ends none."""
    for event in history.children:
        if event["released"] or event["extended"]:
            yield f"the child of {event['pid']} could release or extend its parent's hold: {event}"
        if event["took"] is False:
            yield f"the child of {event['pid']} was refused a lock of its own"


def figures(history: History, terms: Terms) -> dict[str, float]:
    """What a run has seen."""
    sections = history.sections
    return {
        "processes": len(history.processes),
        "tries": len(history.tries),
        "sections": len(sections),
        "refused": sum(each.answer == "refused" for each in history.tries),
        "not answered by the backend": sum(each.answer == "failed" for each in history.tries),
        "renewals": history.counts.get("renewed", 0),
        "losses told": sum(each.doubted < math.inf for each in sections),
        "overlaps, each explained by a fault and told in time": sum(1 for _ in overlaps(history)),
        "guarded transactions": len(history.wrote),
        "guarded transactions refused": history.counts.get("stale", 0),
        "forks": history.counts.get("fork", 0),
        "largest delay, s": round(history.lag, 2),
    }
