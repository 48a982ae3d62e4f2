"""Directives of the site: lists of error messages and of public names, and the output of ``--help``."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("shared/rl_ext_core", "sb3_ext", "torchrl_ext")
# Components of the index of errors: the first whose pattern a module matches.
COMPONENTS = {
    "Buffers": r"rl_ext_core\.(frames|datasets)|torchrl_ext\.(frame_storage|datasets|slice_sampler)|sb3_ext\."
    r"(\w+_buffers?$|contrib|critic_hooks|datasets|observation|prioritized|saved_folders|sequences)",
    "Devices": r"rl_ext_core\.devices",
    "VecEnvs": r"rl_ext_core\.(vector|isolation|recording)|sb3_ext",
    "TorchRL environments": r"torchrl_ext",
    "Environment factories": r"rl_ext_core\.factory",
    "Worker processes": r"rl_ext_core\.(processes|resources|_system|_windows|_import_path|_pickle)",
    "Command line": r"",
}


def component_of(module: str) -> str:
    """Return the component that a module belongs to."""
    return next(name for name, pattern in COMPONENTS.items() if re.match(pattern, module))


def first_words(text: str) -> str:
    """Return a text from its first fixed word on, to sort by."""
    return re.sub(r"^\W*(?:⟨[^⟩]*⟩\W*)+", "", text).lstrip("`'\"").lower()


class Raised(NamedTuple):
    """A place where an exception is raised.

    :ivar error: class of the exception
    :ivar text: its message, with ``⟨…⟩`` in place of values
    :ivar module: module that raises it
    """

    error: str
    text: str
    module: str


def raised() -> Iterator[Raised]:
    """Find all places in the packages that create one of our exceptions with a literal message."""
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
    """Return the public exceptions and their docstrings, in the order of the file."""
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
    """Return the placeholder of a value: the last name in its expression."""
    names = [child for child in ast.walk(node) if isinstance(child, ast.Name | ast.Attribute)]
    last = names[0] if names else None
    found = last.attr if isinstance(last, ast.Attribute) else last.id if isinstance(last, ast.Name) else "…"
    return found.strip("_").replace("_", " ") or "…"


class ErrorIndex(Directive):
    """``error-index``: every error text, by component, with its class and the module that raises it."""

    def run(self) -> list[nodes.Node]:
        """Make the sections."""
        found: dict[str, dict[tuple[str, str], set[str]]] = {component: {} for component in COMPONENTS}
        for place in raised():
            found[component_of(place.module)].setdefault((place.text, place.error), set()).add(place.module)
        sections: list[nodes.Node] = [self._classes()]
        for component, texts in found.items():
            section = nodes.section(ids=[f"errors-{component.lower().replace(' ', '-')}"], names=[component.lower()])
            section += nodes.title(text=component)
            for (text, error), modules in sorted(texts.items(), key=lambda entry: first_words(entry[0][0])):
                source = nodes.inline(text=" from " + ", ".join(sorted(modules)), classes=["error-module"])
                section += _definition(nodes.strong(text=" ".join(text.split())), nodes.literal(text=error), source)
            sections.append(section)
        return sections

    def _classes(self) -> nodes.Node:
        section = nodes.section(ids=["errors-classes"], names=["exception classes"])
        section += nodes.title(text="Exception classes")
        for error, docstring in _error_classes().items():
            section += _definition(nodes.literal(text=error), nodes.Text(docstring.split("\n\n")[0].replace("\n", " ")))
        return section


def _definition(term: nodes.Node, *paragraph: nodes.Node) -> nodes.Node:
    """Make a definition list of one term, whose definition is one paragraph."""
    definition = nodes.definition("", nodes.paragraph("", "", *paragraph))
    return nodes.definition_list("", nodes.definition_list_item("", nodes.term("", "", term), definition))


class NameSummary(Directive):
    """``name-summary``: a table of a module's public names, with the first sentence of their docstrings."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Make the table."""
        module = importlib.import_module(self.arguments[0])
        lines = [".. list-table::", "   :widths: 1 2", ""]
        for name in module.__all__:
            paragraph = " ".join((inspect.getdoc(getattr(module, name)) or "").split("\n\n")[0].split())
            sentence = re.split(r"(?<=\.)\s", paragraph)[0]
            lines += [f"   * - :py:obj:`~{module.__name__}.{name}`", f"     - {sentence}"]
        container = nodes.container()
        self.state.nested_parse(StringList(lines, source="name-summary"), self.content_offset, container)
        return container.children


class CliHelp(Directive):
    """``cli-help``: the output of ``--help`` of each command."""

    def run(self) -> list[nodes.Node]:
        """Make a section for each command."""
        from rl_ext_core.cli import COMMANDS

        sections: list[nodes.Node] = []
        paths = os.pathsep.join([str(ROOT / "shared"), str(ROOT)])
        for name in COMMANDS:
            program = [sys.executable, "-m", "rl_ext_core", name, "--help"]
            environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": paths}
            printed = subprocess.run(program, env=environment, capture_output=True, text=True, check=True).stdout
            section = nodes.section(ids=[f"rl-ext-{name}"], names=[f"rl-ext-{name}"])
            section += nodes.title(text=f"rl-ext {name}")
            section += nodes.literal_block(printed, printed, language="text")
            sections.append(section)
        return sections


def setup(app: Any) -> dict[str, Any]:
    """Register the directives with Sphinx."""
    app.add_directive("error-index", ErrorIndex)
    app.add_directive("cli-help", CliHelp)
    app.add_directive("name-summary", NameSummary)
    return {"version": "1", "parallel_read_safe": True}
