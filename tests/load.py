"""A busy machine: processes that compute for as long as a test runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_cpus(processes: int = 4) -> Iterator[None]:
    """Keep ``processes`` processes computing; each ends by itself after ten minutes at the latest."""
    spin = "import time\nend = time.monotonic() + 600\nwhile time.monotonic() < end: pass"
    running = [subprocess.Popen([sys.executable, "-S", "-c", spin]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()
