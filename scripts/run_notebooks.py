#!/usr/bin/env python3
"""Execute the notebooks of examples/ and store their outputs in them, as the site shows them.

    .venv/bin/python scripts/run_notebooks.py
    .venv/bin/python scripts/run_notebooks.py ppo_retro
    RL_EXT_SHORT=1 .venv/bin/python scripts/run_notebooks.py     # with a few training steps only

Run it after a change to a notebook's code, because ``tests/test_examples.py`` fails if outputs are older than the
code. Training on a console game takes more than half an hour on two cores. Melting Pot's notebook needs
``scripts/make_meltingpot_venv.sh``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
MELTINGPOT = ROOT / ".venv-meltingpot" / "bin" / "python"
KERNEL = "example"


def code_digest(notebook: Any) -> str:
    """Return a digest of a notebook's code cells."""
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def write_kernel(folder: Path, python: Path) -> None:
    """Write a kernel named ``KERNEL``, which runs in an interpreter, to a folder of Jupyter's data."""
    kernel = folder / "kernels" / KERNEL / "kernel.json"
    kernel.parent.mkdir(parents=True)
    argv = [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": argv, "display_name": KERNEL, "language": "python"}))


def execute(path: Path) -> None:
    """Execute a notebook, and write it with its outputs and the digest of its code."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        is_meltingpot = path.stem.startswith("meltingpot")
        write_kernel(Path(folder), MELTINGPOT if is_meltingpot else ROOT / ".venv" / "bin" / "python")
        os.environ["JUPYTER_PATH"] = folder
        # Some notebooks import a module next to them, others write files.
        work = str(EXAMPLES if path.stem.endswith(("torch_env", "prioritized_replay")) else folder)
        resources = {"metadata": {"path": work}}
        client = nbclient.NotebookClient(notebook, timeout=1800, kernel_name=KERNEL, resources=resources)
        client.execute(env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TMPDIR": folder})
        for cell in notebook.cells:
            cell.get("metadata", {}).pop("execution", None)  # times of this run
            if cell.cell_type != "code":
                continue
            # Libraries print warnings about the machine on standard error.
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if output.output_type == "stream":
                    output.text = _hide_paths(output.text, folder)
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "rl_ext": {"code_digest": code_digest(notebook)},
    }
    nbformat.write(notebook, path)


def _hide_paths(text: str, folder: str) -> str:
    """Replace a temporary folder and the repository in a text by neutral paths."""
    text = re.sub(re.escape(folder) + r"[\w./-]*", "/tmp/example", text)
    return text.replace(str(ROOT), "/path/to/rl-ext")


def main() -> None:
    """Execute the notebooks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="notebooks, without .ipynb")
    names = parser.parse_args().names or sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))
    for name in names:
        print(name, flush=True)
        execute(EXAMPLES / f"{name}.ipynb")


if __name__ == "__main__":
    main()
