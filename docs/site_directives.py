"""Directives for the site: ``error-index``, every text with which an exception of ours is raised, and ``cli-help``."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from docutils.parsers.rst import Directive

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("shared/rl_ext_core", "sb3_ext", "torchrl_ext")


class Raised(NamedTuple):
    """One place where an exception is raised.

    :ivar error: its class
    :ivar text: what it says, with ``⟨…⟩`` where values stand
    :ivar module: the module of the place
    """

    error: str
    text: str
    module: str


def raised() -> Iterator[Raised]:
    """Find all places of the packages where an exception of ours is made with a text that is written there."""
    ours = _error_classes()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT / "shared" if package.startswith("shared") else ROOT).parts)
            tree = ast.parse(path.read_text())
            for node in ast.walk(tree):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id in ours
                    and node.args
                ):
                    text = _text(node.args[0])
                    if text is not None and re.search(r"[a-z]{3}", text):
                        yield Raised(node.func.id, text, module.removesuffix(".py").removesuffix(".__init__"))


def _error_classes() -> dict[str, str]:
    """The public exceptions and what each is for, in the order of the file."""
    tree = ast.parse((ROOT / "shared/rl_ext_core/errors.py").read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name: ast.get_docstring(node) or "" for node in classes}


def _text(node: ast.expr) -> str | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = [value.value if isinstance(value, ast.Constant) else f"⟨{_name(value)}⟩" for value in node.values]
        return "".join(map(str, parts))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [_text(side) or "⟨…⟩" for side in (node.left, node.right)]
        return "".join(parts)
    return None


def _name(node: Any) -> str:
    """What stands for a value: the last name in its expression."""
    names = [child for child in ast.walk(node) if isinstance(child, ast.Name | ast.Attribute)]
    last = names[0] if names else None
    found = last.attr if isinstance(last, ast.Attribute) else last.id if isinstance(last, ast.Name) else "…"
    return found.strip("_").replace("_", " ") or "…"


class ErrorIndex(Directive):
    """``error-index``: a section for each class, and in it each text, the line to write included."""

    def run(self) -> list[nodes.Node]:
        """Make the sections."""
        found: dict[str, dict[str, set[str]]] = {}
        for place in raised():
            found.setdefault(place.error, {}).setdefault(place.text, set()).add(place.module)
        sections: list[nodes.Node] = []
        for error, purpose in _error_classes().items():
            if error not in found:
                continue
            section = nodes.section(ids=[error.lower()], names=[error.lower()])
            section += nodes.title(text=error)
            section += nodes.paragraph(text=purpose.split("\n\n")[0].replace("\n", " "))
            for text, modules in sorted(found[error].items()):
                item = nodes.definition_list_item()
                term = nodes.term()
                term += nodes.literal(text=" ".join(text.split()))
                definition = nodes.definition()
                definition += nodes.paragraph(text="from " + ", ".join(sorted(modules)))
                item += [term, definition]
                section += nodes.definition_list("", item)
            sections.append(section)
        return sections


class CliHelp(Directive):
    """``cli-help``: what ``--help`` of each command prints."""

    def run(self) -> list[nodes.Node]:
        """Make a section for each command."""
        from rl_ext_core.cli import COMMANDS

        sections: list[nodes.Node] = []
        paths = os.pathsep.join([str(ROOT / "shared"), str(ROOT)])
        for name in COMMANDS:
            program = [sys.executable, "-m", "rl_ext_core", name, "--help"]
            environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": paths}
            said = subprocess.run(program, env=environment, capture_output=True, text=True, check=True).stdout
            section = nodes.section(ids=[f"rl-ext-{name}"], names=[f"rl-ext-{name}"])
            section += nodes.title(text=f"rl-ext {name}")
            section += nodes.literal_block(said, said, language="text")
            sections.append(section)
        return sections


def setup(app: Any) -> dict[str, Any]:
    """Register them."""
    app.add_directive("error-index", ErrorIndex)
    app.add_directive("cli-help", CliHelp)
    return {"version": "1", "parallel_read_safe": True}
