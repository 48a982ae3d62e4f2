from __future__ import annotations

import subprocess
import sys

import pytest

MIB = 64
FORKED = f"""
import os, sys
from benchmarks.processes import private_mib, proportional_mib
before = private_mib()
filled = b"x" * ({MIB} << 20)
alone = private_mib() - before
reading, writing = os.pipe()
if not os.fork():
    os.close(writing)
    os.read(reading, 1)
    os._exit(0)
print(alone, private_mib() - before, proportional_mib())
"""


def test_memory_shared_with_a_fork_is_not_private_and_counts_half() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], check=True, stdout=subprocess.PIPE, text=True)
    alone, shared, proportional = map(float, done.stdout.split())
    assert alone == pytest.approx(MIB, abs=2)
    assert shared < 2
    assert MIB / 2 < proportional < MIB
