"""``make demo``, ``make test``, ``make lint`` and ``make docs`` where there is no make: ``python tasks.py test``.

Needs nothing but Python's standard library; makes a virtual environment in ``.venv`` first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
EXTRAS = {"demo": "demo", "test": "test", "quick": "sb3,torchrl,frames-jpeg", "lint": "dev", "docs": "docs"}
# The tests for any system, and what they need: what other tests need has no wheels for some systems.
QUICK = ["pytest>=8", "pytest-timeout>=2.2", "pytest-xdist>=3.5", "hypothesis>=6.90"]
QUICK_TESTS = ["--confcutdir", "tests/platforms", "tests/platforms"]


def run(python: Path, *command: str) -> None:
    """Run a program in the repository; end with its status where that is not 0."""
    status = subprocess.run([str(python), *command], cwd=ROOT, check=False).returncode
    if status:
        raise SystemExit(status)


def set_up(task: str, *, constrained: bool) -> None:
    """Install what a task needs, once."""
    stamp = VENV / f".task-{task}"
    newest = max((ROOT / name).stat().st_mtime for name in ("pyproject.toml", "constraints.txt"))
    if stamp.exists() and stamp.stat().st_mtime >= newest:
        return
    if not PYTHON.exists():
        venv.create(VENV, with_pip=True)
    constraints = ["--constraint", "constraints.txt"] if constrained else []
    more = QUICK if task == "quick" else []
    run(PYTHON, "-m", "pip", "install", "--quiet", *constraints, "--editable", f".[{EXTRAS[task]}]", *more)
    stamp.touch()


def main() -> None:
    """Run one task."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="What else is given goes to the program.")
    parser.add_argument("task", choices=sorted(EXTRAS), help="quick: the tests for any system alone")
    parser.add_argument("--installed", action="store_true", help="use this Python, where all is installed")
    parser.add_argument("--newest", action="store_true", help="the newest versions, not those of constraints.txt")
    arguments, others = parser.parse_known_args()
    python = Path(sys.executable) if arguments.installed else PYTHON
    if not arguments.installed:
        set_up(arguments.task, constrained=not arguments.newest)
    if arguments.task == "demo":
        run(python, "examples/dqn_atari_memory.py", *others)
    elif arguments.task == "lint":
        run(python, "-m", "ruff", "format", "--check", ".")
        run(python, "-m", "ruff", "check", ".")
        run(python, "-m", "mypy")
    elif arguments.task == "docs":
        # A warning is an error: a page that is not there, a name that cannot be documented.
        run(python, "-m", "sphinx", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html", *others)
    else:
        # With CI set, slow tests run too. What tries every case of something takes hours, and has a target of its own.
        slow = os.environ.get("CI")
        select = "not exhaustive" if slow else "not exhaustive and not slow"
        tests = QUICK_TESTS if arguments.task == "quick" else []
        run(python, "-m", "pytest", "--numprocesses", "logical", "--dist", "worksteal", "-m", select, *tests, *others)


if __name__ == "__main__":
    main()
