"""Virtual environment of Melting Pot, which conflicts with other tests' requirements."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.devices.fakes.build import skip_or_fail

VENV = Path(__file__).resolve().parents[3] / ".venv-meltingpot"


def python() -> Path:
    """Return the interpreter of Melting Pot's virtual environment, or skip the test.

    If CI is set, only the reason that the setup script recorded skips the test.
    """
    if (VENV / ".installed").exists():
        return VENV / "bin" / "python"
    skipped = VENV / ".skipped"
    if skipped.exists():
        pytest.skip(skipped.read_text().strip())
    skip_or_fail(f"{VENV} does not exist. Run scripts/make_meltingpot_venv.sh")
