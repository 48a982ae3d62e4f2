"""Fixture of the tests that check for workers."""

from __future__ import annotations

import pytest

from tests.leaks import ignore_running_processes


@pytest.fixture(autouse=True)
def ignore_earlier_processes() -> None:
    """Let ``no_workers`` ignore processes that ran before the test, such as those of session fixtures."""
    ignore_running_processes()
