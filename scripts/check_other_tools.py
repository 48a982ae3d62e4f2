"""Run the scripts of docs/recipes.md that use other tools, each in an empty folder.

check_other_tools.sh installs the tools and runs it. It prints one line per section. The exit status is 1 if a script
failed.

    scripts/check_other_tools.sh [part of a section's title ...]
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ("Optuna", "Weights & Biases", "hydra", "imitation", "CleanRL")
ZOO = """
CartPole-v1:
  n_timesteps: 400
  policy: MlpPolicy
  learning_starts: 100
  replay_buffer_class: __import__("sb3_ext").CompressedReplayBuffer
  callback: sb3_ext.VecEnvTimingCallback
"""


def find_scripts() -> dict[str, str]:
    """Return the first block of Python in each section."""
    text = (ROOT / "docs" / "recipes.md").read_text()
    sections = re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    found = {title: re.search(r"```python\n(.*?)```", body, re.S) for title, body in sections}
    return {title: code[1] for title, code in found.items() if code and title.startswith(SECTIONS)}


def run(title: str, arguments: list[str], files: dict[str, str]) -> bool:
    """Run a Python program in a folder with some files; return whether it succeeded."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text)
        environ = {**os.environ, "WANDB_SILENT": "true", "TMPDIR": folder}
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=folder,
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    print(f"{'ok' if done.returncode == 0 else 'FAILED':8}{title}")
    if done.returncode:
        print(done.stdout[-3000:])
    return done.returncode == 0


def main() -> int:
    """Run the programs, and return the exit status."""
    zoo = ["--algo", "dqn", "--env", "CartPole-v1", "--conf-file", "dqn.yml", "--log-folder", "logs"]
    programs = {"rl-zoo3": ([str(ROOT / "examples" / "rl_zoo3_train.py"), *zoo], {"dqn.yml": ZOO})}
    programs |= {title: (["script.py"], {"script.py": code}) for title, code in find_scripts().items()}
    wanted = {
        title: program
        for title, program in programs.items()
        if not sys.argv[1:] or any(word.lower() in title.lower() for word in sys.argv[1:])
    }
    results = [run(title, *program) for title, program in wanted.items()]
    return 0 if wanted and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
