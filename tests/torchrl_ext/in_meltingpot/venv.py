"""The environment that has Melting Pot: what it imports does not go together with what the other tests need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.devices.fakes.build import skip_or_fail

VENV = Path(__file__).resolve().parents[3] / ".venv-meltingpot"


def python() -> Path:
    """Give its interpreter, or skip the test; where CI is set, only for the reason that the script gave."""
    if (VENV / ".installed").exists():
        return VENV / "bin" / "python"
    skipped = VENV / ".skipped"
    if skipped.exists():
        pytest.skip(skipped.read_text().strip())
    skip_or_fail(f"{VENV} is not there; make it with: scripts/make_meltingpot_venv.sh")
