"""Modes of launching Python code: a script, ``python -c``, standard input, a notebook."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat

from tests import programs

ROOT = Path(__file__).resolve().parent.parent
LAUNCH_MODES = ("script", "-c", "stdin", "notebook")


def run_program(launch_mode: str, text: str, folder: Path, *, preloaded: str) -> str:
    """Run a program in a launch mode, and return its output.

    :param launch_mode: one of ``LAUNCH_MODES``
    :param text: source of the program, which defines ``__main__``. Lines ``# %%`` separate the cells of a notebook
    :param folder: working directory
    :param preloaded: key of ``programs.PRELOADED``, whose imports scripts and programs of ``-c`` then have already
    :raises AssertionError: If the program fails. The message has its output.
    """
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "shared")])}
    if launch_mode == "notebook":
        return _run_notebook(text, folder, environ)
    script = folder / "train.py"
    script.write_text(text)
    if launch_mode == "stdin":
        options = {"capture_output": True, "text": True, "cwd": folder, "env": environ, "timeout": 240}
        done = subprocess.run([sys.executable, "-"], input=text, **options)
    else:
        file = script if launch_mode == "script" else None
        done = programs.run(text, preloaded, file=file, cwd=folder, environ=environ)
    assert done.returncode == 0, f"{launch_mode}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def _run_notebook(text: str, folder: Path, environ: dict[str, str]) -> str:
    cells = [nbformat.v4.new_code_cell(part) for part in text.split("# %%\n")]
    book = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(book, timeout=240, kernel_name="python3")
    client.execute(cwd=str(folder), env=environ)
    outputs = [out for cell in book.cells for out in cell.outputs if out.output_type == "stream"]
    return "".join(out.text for out in outputs if out.name == "stdout")
