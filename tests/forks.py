from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


def result_in_fork(function: Callable[[], Any]) -> str:
    """Call a function in a forked process, which is killed after a minute, and return its result as text.

    :return: ``repr`` of the result, or type and text of the exception
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest's handler would continue with the tests here
        signal.alarm(60)
        try:
            try:
                text = repr(function())
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
            os.write(writing, text.encode()[:4000])
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as file:
        text = file.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, f"the forked process did not end: {text}"
    return text
