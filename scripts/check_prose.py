#!/usr/bin/env python3
"""Check docs, docstrings, comments and error texts against the project's rules of writing.

Prints one line per violation and exits with 1 if there is any. ``make lint`` runs it over the whole repository.

    python scripts/check_prose.py                  # every tracked file
    python scripts/check_prose.py sb3_ext docs     # some folders or files

The rules:

- A sentence has at most 25 words.
- A docstring does not begin with a question word, "Of" or "That".
- ``WORDS`` lists words that this project does not use.
- A function's name begins with a verb. A name at module level has one meaning in the three packages.

``SHARED_NAMES`` lists the exceptions, each with its reason.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("shared/rl_ext_core/", "sb3_ext/", "torchrl_ext/")
MAX_WORDS = 25

# Beginnings of words in British spelling.
_BRITISH = """vectoris normalis initialis uninitialis parametris organis recognis optimis serialis synchronis minimis
maximis summaris randomis discretis specialis generalis utilis visualis realis(?!m|t) customis categoris tokenis
memoris characteris finalis standardis localis authoris materialis quantis analys(?:e|ed|ing)\\b behaviour colour
licence favour centre\\b artefact modell(?:ed|ing) labell(?:ed|ing) neighbour cancell(?:ed|ing)"""
# A pattern, and what to write instead.
WORDS = {
    r"(?<!there )(?<!There )\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|fewer\b|doubt\b)": "is not a",
    r"(?:[.;] |\n)Write (?=[a-z_]+[=(.])": "Use",  # the line to write instead, at the end of an error message
    r"\banew\b": "again",
    r"\bbeside\b": "next to, in addition to",
    r"\bnobody\b": "the actor's name",
    r"\bkin\b": "the class's name",
    r"\bbears?\b": "tolerate",
    r"\bmend(?:s|ed|ing)?\b": "fix, repair",
    r"\bsettle[sd]?\b": "flush, decide",
    r"\btold\b": "reported",
    r"\bbut for\b": "except",
    r"\bin silence\b": "silently",
    r"\blikewise\b": "what is the same",
    r"\bas far as\b": "the limit itself",
    r"\b(?:" + "|".join(_BRITISH.split()) + r")": "American spelling",
}
# Names of functions that do not say what is done: participles alone, prepositions, question words.
UNCLEAR_NAME = re.compile(
    r"_*(?:(?!\w*seed$|need|feed|embed|shed|speed)\w*[a-z]ed|said|meant|held|kept|begun|made|given|taken|found|left|lost|known|gone|done|drawn|bound"
    r"|at|in|of|beyond|within|around|under|over|among|apart|again|else|who|what|whether|where)$"
)
FIRST_WORD = re.compile(r"(?:What|Who|Whoever|Whom|Whose|Which|Of|That)\b")

# Module-level names that several modules define, and why that is one meaning.
SHARED_NAMES: dict[str, str] = {
    "main": "entry points",
    "add_arguments": "each command of rl-ext has these two functions",
    "run": "each command of rl-ext has these two functions",
    "as_factory": "that of torchrl_ext is the core's, for environments of TorchRL",
}


class Passage(NamedTuple):
    """Text to check: a docstring, a block of comments, a string or a page.

    :ivar path: its file, relative to the repository
    :ivar line: the line that it begins in
    :ivar kind: ``"docstring"``, ``"comment"``, ``"string"`` or ``"page"``
    :ivar text: its text
    """

    path: str
    line: int
    kind: str
    text: str


def tracked(paths: list[str]) -> list[str]:
    """List the Python, Markdown and notebook files under some paths, without ignored ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *paths]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in names if name.endswith((".py", ".md", ".ipynb")) and (ROOT / name).exists()]


@functools.cache
def parse(name: str) -> ast.Module:
    """Parse a Python file, once."""
    return ast.parse((ROOT / name).read_text(encoding="utf-8"))


def passages(name: str) -> Iterator[Passage]:
    """Yield the prose of a Python, Markdown or notebook file."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".py"):
        yield from _python_passages(name, text)
    elif name.endswith(".md"):
        yield Passage(name, 1, "page", text)
    else:
        for cell in json.loads(text)["cells"]:
            if cell["cell_type"] == "markdown":
                yield Passage(name, 1, "page", "".join(cell["source"]))


def _python_passages(name: str, text: str) -> Iterator[Passage]:
    """Yield the docstrings, strings and comment blocks of a Python file."""
    docstrings = set()
    tree = parse(name)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                value = node.body[0].value  # type: ignore[attr-defined]
                docstrings.add(value)
                yield Passage(name, value.lineno, "docstring", docstring)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield Passage(name, node.lineno, "string", node.value)
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != last + 1:
            yield Passage(name, start, "comment", " ".join(block))
            block = []
        start = start if block else token.start[0]
        last = token.start[0]
        block.append(token.string.lstrip("#: "))
    if block:
        yield Passage(name, start, "comment", " ".join(block))


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Split a text into paragraphs, list items, table cells and docstring fields, without its code.

    :return: each with the number of its first line, from 0
    """
    current: list[str] = []
    first = 0
    open_fences: list[bool] = []  # whether each contains code
    literal = None
    for number, line in enumerate([*text.splitlines(), ""]):
        stripped = line.strip()
        indent = len(line) - len(line.lstrip())
        fence = re.match(r"(?:[-*]\s+)*(?:`{3,}|~{3,}|:{3,})(.*)", stripped)
        if fence is not None:
            if fence[1] or not open_fences:
                open_fences.append(not fence[1].startswith(("{admonition}", "{note}", "{tip}", "{list-table}")))
            else:
                open_fences.pop()
            stripped, starts = "", True
        elif any(open_fences):
            continue
        elif literal is not None:
            if stripped and indent <= literal:
                literal, starts = None, True
            else:
                continue
        elif stripped.startswith((">>>", "...", "<", "+--", "===", "---", ".. ", "$ ")):
            stripped, starts = "", True
        else:
            starts = bool(re.match(r"(?:[-*+]|\d+[.)]|:\w[^:]*:|#+|\||>)\s", stripped)) or not stripped
        if starts:
            if current:
                yield first, " ".join(current)
            current, first = [], number
        if stripped.startswith("|"):
            for cell in stripped.strip("|").split("|"):
                yield number, cell.strip()
        elif stripped:
            current.append(re.sub(r"^(?:[-*+]|\d+[.)]|#+|>|:\w[^:]*:)\s+", "", stripped))
            if stripped.endswith("::"):
                literal = indent


def sentences(block: str) -> list[str]:
    """Split a paragraph into sentences. Code counts as one word; of a link, only the text is kept."""
    block = re.sub(r"(?:\{[\w:]+\}|:[\w:]+:)?(`+).+?\1_*", "CODE", block)
    block = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)
    block = re.sub(r"\b(?:e\.g|i\.e|etc|vs|cf)\.", "abbr", block)
    return [part.strip() for part in re.split(r"(?<=[.!?…])[)\"*]*\s+(?=[A-Z0-9\"*(_])", block) if part.strip()]


def violations(passage: Passage) -> Iterator[tuple[int, str]]:
    """Check a passage; yield lines of the file, and what is wrong in them."""
    if passage.kind == "docstring" and FIRST_WORD.match(passage.text):
        yield passage.line, f"docstring begins with {passage.text.split()[0]!r}: begin with the subject or the verb"
    if passage.kind == "string" and not passage.path.startswith(PACKAGES):
        return
    if passage.kind in ("docstring", "page"):
        pieces = [
            (passage.line + number, sentence) for number, block in blocks(passage.text) for sentence in sentences(block)
        ]
    else:
        pieces = [(passage.line, re.sub(r"`[^`]*`", "CODE", passage.text))]
    for line, sentence in pieces:
        n_words = len(re.findall(r"[\w'/.-]*\w[\w'/.-]*", sentence))
        if n_words > MAX_WORDS and passage.kind in ("docstring", "page"):
            yield line, f"{n_words} words: {sentence[:90]}…"
        for pattern, instead in WORDS.items():
            for found in re.finditer(pattern, sentence, re.IGNORECASE):
                yield line, f"{found.group().strip()!r}: write {instead!r}"


def unclear_names(names: list[str]) -> Iterator[str]:
    """Find functions of the packages, properties apart, whose one-word name says no effect."""
    for name in names:
        if name.startswith(PACKAGES) and name.endswith(".py"):
            for node in ast.walk(parse(name)):
                if not isinstance(node, ast.FunctionDef) or "_" in node.name.strip("_"):
                    continue
                is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
                if UNCLEAR_NAME.match(node.name) and not is_property:
                    yield f"{name}:{node.lineno}: {node.name!r} says no effect: begin with a verb"


def shared_names(names: list[str]) -> Iterator[str]:
    """Find classes and functions of module level that two modules of the packages define."""
    found: dict[str, list[str]] = {}
    for name in names:
        if not name.startswith(PACKAGES) or not name.endswith(".py"):
            continue
        for node in parse(name).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                places = found.setdefault(node.name, [])
                if not any(place.startswith(f"{name}:") for place in places):
                    places.append(f"{name}:{node.lineno}")
    for name, places in sorted(found.items()):
        if len(places) > 1 and not name.startswith("__") and name not in SHARED_NAMES:
            yield f"{places[0]}: {name!r} is defined in other modules too: {', '.join(places[1:])}"


def main() -> int:
    """Check the files, and print what is wrong."""
    names = tracked(sys.argv[1:])
    lines = [
        f"{name}:{line}: {problem}"
        for name in names
        for passage in passages(name)
        for line, problem in violations(passage)
    ]
    lines += [*unclear_names(names), *shared_names(names)]
    print("\n".join(lines), end="\n" if lines else "")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
