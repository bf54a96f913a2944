"""Exceptions of a signal handler, put at an instruction of the test's choice."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


class Struck(BaseException):
    """As raised by a signal handler: not an error of anything that it interrupts."""


class _Counter:
    """Raises at the instruction number ``at``, once."""

    def __init__(self, at: int, within: str) -> None:
        self.at, self.within, self.passed = at, within, 0
        self._thread = threading.get_ident()

    def count(self, code: CodeType) -> None:
        if threading.get_ident() == self._thread and code.co_filename.startswith(self.within):
            self.passed += 1
            if self.passed == self.at:
                raise Struck


def strike(call: Callable[[], object], at: int, within: str) -> bool:
    """Run ``call``, and raise Struck before its instruction number ``at`` in the files below the path ``within``.

    False if it has fewer: it has run to its end then. Counted are Python's instructions, on this thread.
    """
    counter = _Counter(at, within)
    try:
        (_with_monitoring if sys.version_info >= (3, 12) else _with_trace)(counter, call)
    except Struck:
        return True
    return counter.passed >= at  # struck where Python drops what is raised, as in a finalizer


def _with_monitoring(counter: _Counter, call: Callable[[], object]) -> None:
    """sys.settrace() forgets instructions on Python 3.13: those of a function's first call, and after an exception."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    tool, event = monitoring.PROFILER_ID, monitoring.events.INSTRUCTION
    monitoring.use_tool_id(tool, "strikes")
    try:
        monitoring.register_callback(tool, event, lambda code, offset: counter.count(code))
        monitoring.set_events(tool, event)
        call()
    finally:
        monitoring.set_events(tool, 0)
        monitoring.register_callback(tool, event, None)
        monitoring.free_tool_id(tool)


def _with_trace(counter: _Counter, call: Callable[[], object]) -> None:
    def instruction(frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            counter.count(frame.f_code)
        return instruction

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return instruction

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
