"""Run the Makefile's tasks without make: ``python tasks.py demo|test|quick|lint|docs``.

This needs only Python's standard library. It first creates a virtual environment in ``.venv``.
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
# Requirements of the tests for any system; some requirements of other tests have no wheels for some systems.
QUICK = ["pytest>=8", "pytest-timeout>=2.2", "pytest-xdist>=3.5", "hypothesis>=6.90"]
QUICK_TESTS = ["--confcutdir", "tests/platforms", "tests/platforms"]


def run(python: Path, *command: str) -> None:
    """Run Python in the repository, and exit with its status if that is not 0."""
    status = subprocess.run([str(python), *command], cwd=ROOT, check=False).returncode
    if status:
        raise SystemExit(status)


def set_up(task: str, *, constrained: bool) -> None:
    """Install a task's requirements, unless they are installed already."""
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
    """Run the task that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, epilog="Further arguments are passed to the program.")
    parser.add_argument("task", choices=sorted(EXTRAS), help="quick: only the tests for any system")
    parser.add_argument("--installed", action="store_true", help="use this Python, and install nothing")
    parser.add_argument("--newest", action="store_true", help="install the newest versions, without constraints.txt")
    arguments, others = parser.parse_known_args()
    python = Path(sys.executable) if arguments.installed else PYTHON
    if not arguments.installed:
        set_up(arguments.task, constrained=not arguments.newest)
    if arguments.task == "demo":
        run(python, "examples/dqn_atari_memory.py", *others)
    elif arguments.task == "lint":
        run(python, "-m", "ruff", "format", "--check", ".")
        run(python, "-m", "ruff", "check", ".")
        run(python, "scripts/check_prose.py")
        # The program, because the package importlinter cannot be run with -m.
        run(python, "-c", "import importlinter.cli as cli; cli.lint_imports_command()", "--no-cache", "--no-logo")
        run(python, "-m", "mypy")
    elif arguments.task == "docs":
        # -W turns warnings into errors, such as missing pages and undocumented names.
        run(python, "-m", "sphinx", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html", *others)
    else:
        # With CI set, slow tests run too. Exhaustive tests take hours, and have a make target of their own.
        slow = os.environ.get("CI")
        select = "not exhaustive" if slow else "not exhaustive and not slow"
        tests = QUICK_TESTS if arguments.task == "quick" else []
        run(python, "-m", "pytest", "--numprocesses", "logical", "--dist", "worksteal", "-m", select, *tests, *others)


if __name__ == "__main__":
    main()
