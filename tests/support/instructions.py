"""Do something at a certain instruction of some modules, as a signal handler may."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Counter:
    """How many instructions were passed, and whether the one that was meant was among them."""

    def __init__(self) -> None:
        self.passed = 0
        self.struck = False


@contextlib.contextmanager
def at_instruction(number: int, action: Callable[[], object], *paths: str) -> Iterator[Counter]:
    """Call `action` before the instruction of that number in files whose names have one of `paths`."""
    counter = Counter()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not any(path in frame.f_code.co_filename for path in paths):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not counter.struck:
            counter.passed += 1
            if counter.passed > number:
                counter.struck = True
                sys.settrace(None)
                frame.f_trace = None
                action()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield counter
    finally:
        sys.settrace(before)
