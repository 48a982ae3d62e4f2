"""Load on all CPU cores while a test runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_cpus(processes: int = 4) -> Iterator[None]:
    """Run processes that compute, within a ``with`` block.

    :param processes: number of processes; each ends after ten minutes at the latest
    """
    spin = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: pass"
    running = [subprocess.Popen([sys.executable, "-S", "-c", spin]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
