"""SIGTERM and SIGINT are requests: training saves and stops at its next opportunity, whatever it is doing."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

REQUESTS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_requests(*, is_patient: bool = False) -> Iterator[Callable[[], str | None]]:
    """Takes the signals in this block; gives a function that says which one came first, None while none has.

    Args:
        is_patient: whether a second SIGINT is ignored. A launcher passes on what a terminal has sent already; without
            one, who presses Ctrl-C twice wants to stop at once, and gets a KeyboardInterrupt.
    """
    asked: list[str] = []

    def receive(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and asked and not is_patient:
            raise KeyboardInterrupt
        if not asked:
            # Not print: the signal may have come in the middle of one.
            os.write(2, f"{name}: saving, then stopping\n".encode())
        asked.append(name)

    def first() -> str | None:
        return asked[0] if asked else None

    if threading.current_thread() is not threading.main_thread():
        yield first
        return
    before = {number: signal.signal(number, receive) for number in REQUESTS}
    try:
        yield first
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
