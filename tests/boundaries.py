"""Finds what crosses the project's boundaries, in source text and in a fresh interpreter."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

FOLDERS = {
    "rl_ext_core": ROOT / "shared" / "rl_ext_core",
    "torchrl_ext": ROOT / "torchrl_ext",
    "sb3_ext": ROOT / "sb3_ext",
}
TORCHRL = {"torchrl", "tensordict", "torchrl_ext"}
SB3 = {"stable_baselines3", "sb3_contrib", "sb3_ext"}
FORBIDDEN = {"rl_ext_core": TORCHRL | SB3, "torchrl_ext": SB3, "sb3_ext": TORCHRL}

DEVICE_VARIABLE = re.compile(r"\b(CUDA_VISIBLE_DEVICES|MUJOCO_(GL|EGL)|EGL_[A-Z])")


def forbidden_imports(source: str, forbidden: set[str]) -> list[str]:
    """List the imports of ``forbidden`` packages, those by ``import_module("...")`` included."""
    found = (name for node in ast.walk(ast.parse(source)) for name in _imported(node))
    return [name for name in found if name.split(".")[0] in forbidden]


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield node.module or ""
    elif isinstance(node, ast.Call) and _last_name(node.func) in {"import_module", "__import__"}:
        yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and type(arg.value) is str)


def device_decisions(source: str) -> list[str]:
    """List what only ``rl_ext_core.devices`` may do: ask for CUDA, name the variables that pick devices."""
    tree = ast.parse(source)
    docstrings = {id(node) for node in _docstrings(tree)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "is_available" and _last_name(node.value) == "cuda":
            found.append(f"line {node.lineno}: cuda.is_available")
        if isinstance(node, ast.ImportFrom) and node.module == "torch.cuda":
            found += [f"line {node.lineno}: {a.name}" for a in node.names if a.name == "is_available"]
        text = node.value if isinstance(node, ast.Constant) and id(node) not in docstrings else None
        if isinstance(text, str) and DEVICE_VARIABLE.search(text):
            found.append(f"line {node.lineno}: {text[:60]!r}")  # type: ignore[attr-defined]
    return found


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the constants that are statements: docstrings, which may explain what they like."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def loaded_by(statement: str, packages: set[str]) -> set[str]:
    """Run ``statement`` in a fresh interpreter and tell which of ``packages`` it loaded."""
    code = f"import sys\n{statement}\nprint(*sorted({packages!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{statement!r} failed:\n{done.stderr}"
    return set(done.stdout.split())
