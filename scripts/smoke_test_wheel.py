"""Install the wheel into an empty virtual environment, and run the quickstart.

    python scripts/smoke_test_wheel.py [--python python3.12] [--newest]

Every block of ``docs/quickstart.md`` runs in its own process, in an empty folder. Versions are those of
``constraints.txt``, which is for Python 3.11. ``--newest`` installs the newest versions instead.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "docs" / "quickstart.md"


def code_blocks() -> dict[str, str]:
    """Return the quickstart's blocks of Python by heading."""
    sections = re.split(r"^## ", QUICKSTART.read_text(), flags=re.MULTILINE)[1:]
    found = {section.splitlines()[0]: re.findall(r"```python\n(.*?)```", section, re.DOTALL) for section in sections}
    return {title: code for title, (code,) in found.items()}


def main() -> None:
    """Build and install the wheel, and run all blocks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--newest", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
        subprocess.run(build, check=True)
        (wheel,) = folder.glob("*.whl")
        venv = folder / "venv"
        subprocess.run([options.python, "-m", "venv", str(venv)], check=True)
        python = str(venv / "bin" / "python")
        constraints = [] if options.newest else ["--constraint", str(ROOT / "constraints.txt")]
        install = [python, "-m", "pip", "install", "--quiet", *constraints]
        subprocess.run([*install, "torch"], check=True)  # alone, so that pip prefers a local build
        subprocess.run([*install, f"{wheel}[sb3,torchrl,atari,mujoco]"], check=True)
        for number, (title, code) in enumerate(code_blocks().items()):
            empty = folder / str(number)
            empty.mkdir()
            (empty / "script.py").write_text(code)
            environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
            done = subprocess.run([python, "script.py"], cwd=empty, env=environment, capture_output=True, text=True)
            print(f"{'failed' if done.returncode else 'ok':8}{title}")
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)


if __name__ == "__main__":
    main()
