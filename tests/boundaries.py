"""Checks of package boundaries: device variables in sources, and loaded packages."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (ROOT / "shared" / "rl_ext_core", ROOT / "torchrl_ext", ROOT / "sb3_ext")
DEVICE_VARIABLE = re.compile(r"\b(CUDA_VISIBLE_DEVICES|MUJOCO_(GL|EGL)|EGL_[A-Z])")


def device_variables(source: str) -> list[str]:
    """List lines outside docstrings that name environment variables for device selection."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and type(node.value) is str]
    return [
        f"line {node.lineno}: {node.value[:60]!r}"
        for node in texts
        if id(node) not in docstrings and DEVICE_VARIABLE.search(str(node.value))
    ]


def modules_loaded_by(statement: str, packages: set[str]) -> set[str]:
    """Run ``statement`` in a new interpreter, and return which of ``packages`` it loaded."""
    code = f"import sys\n{statement}\nprint(*sorted({packages!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{statement!r} failed:\n{done.stderr}"
    return set(done.stdout.split())
