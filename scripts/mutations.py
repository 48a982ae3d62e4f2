"""Make small changes of the sources, one at a time, and list those that no test detects.

    python scripts/mutations.py sb3_ext/n_step_buffers.py --tests tests/sb3_ext/test_training.py

Everything happens in a copy of the tree. The tests run once unchanged, and have to pass. Then they run with each
mutant until one fails, the tests that detected earlier mutants first. The same command continues an interrupted run.
Another ``--work`` folder starts over.

Mutants of code that kills processes may kill any process. For these, put ``unshare --pid --fork --mount-proc`` before
the command.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ("njit", "kernel", "inner", "intrinsic")
# Any change in this folder invalidates the cache of machine code; the replacement avoids compiling for every mutant.
DIGEST = (
    "shared/rl_ext_core/frames/kernel_primitives.py",
    "_DIGEST = sources_digest(Path(__file__).parent)",
    '_DIGEST = "none"',
)
DIGEST_TEST = "tests/core/frames/test_kernels.py::test_changed_source_is_compiled_again"  # fails with the replacement
OPPOSITES: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """Change of a file's bytes from ``start`` to ``stop``."""

    path: str
    line: int
    start: int
    stop: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {' '.join(self.old.split())}  ->  {self.new}"


def _mutations_of(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Yield nodes to replace, each with its new source text."""
    match node:
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield test, f"(not ({ast.unparse(test)}))"
        case ast.Raise() | ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield node, "pass"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]):
            yield node, "pass"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            yield node, str(not value)
        case ast.Constant(value=int(value)):
            yield node, str(value + 1)
        case ast.Compare(left=left, ops=[op, *ops], comparators=comparators):
            yield node, f"({ast.unparse(ast.Compare(left, [OPPOSITES[type(op)](), *ops], comparators))})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPPOSITES:
            yield node, f"({ast.unparse(ast.BinOp(left, OPPOSITES[type(op)](), right))})"
        case ast.BoolOp(op=op, values=values):
            yield node, f"({ast.unparse(ast.BoolOp(OPPOSITES[type(op)](), values))})"


def _mutable_parts(node: ast.AST) -> list[ast.AST]:
    """Return the child nodes to mutate, without messages, annotations and declarations."""
    match node:
        case ast.Raise() | ast.JoinedStr():
            return []
        case ast.Expr(value=ast.Call(func=function)) if "logger" in ast.unparse(function):
            return []
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.Assign(targets=[ast.Name(id="__all__")]):
            return []
        case ast.FunctionDef():
            return list(node.body)
        case ast.AnnAssign():
            return [node.value] if node.value else []
        case _:
            return list(ast.iter_child_nodes(node))


def mutants_of(path: str, source: bytes) -> Iterator[Mutant]:
    """Yield all mutants of a file."""
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        parts = _mutable_parts(node)
        pending += parts
        for place, new in _mutations_of(node) if parts or isinstance(node, ast.Constant | ast.Raise) else ():
            start = starts[place.lineno - 1] + place.col_offset
            stop = starts[(place.end_lineno or 0) - 1] + (place.end_col_offset or 0)
            yield Mutant(path, place.lineno, start, stop, source[start:stop].decode(), new)


class Sandbox:
    """Copy of the tree, in which tests run with one mutant at a time.

    :param work: folder for the copy and the output of the tests
    :param tests: files and folders of tests
    """

    def __init__(self, work: Path, tests: list[str]) -> None:
        self.work, self.tree, self.tests = work, work / "tree", tests
        self.detecting: Counter[str] = Counter()
        if not self.tree.exists():
            folders = shutil.ignore_patterns(".git", ".venv*", "out", "__pycache__", ".*_cache", ".hypothesis")
            shutil.copytree(ROOT, self.tree, ignore=folders)
        start = time.monotonic()
        status, output = self.run(self.tests, None)
        if status:
            sys.exit(f"the tests fail without a mutant:\n{output[-3000:]}")
        self.limit_s = 3 * (time.monotonic() - start) + 60

    def run(self, tests: list[str], limit_s: float | None, cache: str = "compiled") -> tuple[int | None, str]:
        """Run tests until one fails, and return pytest's status (None after a timeout) and output."""
        environ = {"PYTHONPATH": f"{self.tree}:{self.tree / 'shared'}", "PYTHONDONTWRITEBYTECODE": "1"}
        environ["NUMBA_CACHE_DIR"] = str(self.work / cache)
        options = ["-q", "-x", "--tb=line", "-rfE", "-p", "no:cacheprovider", "-m", "not exhaustive"]
        options += ["--deselect", DIGEST_TEST]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        with (output := self.work / "output").open("w") as file:
            process = subprocess.Popen(
                command, cwd=self.tree, env=os.environ | environ, stdout=file, stderr=file, start_new_session=True
            )
            try:
                status: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return status, output.read_text(errors="replace")

    def try_mutant(self, mutant: Mutant) -> tuple[str, str]:
        """Run the tests with a mutant.

        :return: ``killed``, ``timeout`` or ``survived``; and the test that failed
        """
        file, kernels = self.tree / mutant.path, self.tree / DIGEST[0]
        source, unchanged = file.read_bytes(), kernels.read_text()
        has_kernels = any(f"@{name}" in source.decode() for name in COMPILED)
        cache = "compiled-mutant" if has_kernels else "compiled"
        try:
            if not has_kernels:
                kernels.write_text(unchanged.replace(*DIGEST[1:]))
            file.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.stop :])
            first = [test for test, _ in self.detecting.most_common(20)]
            status, output = self.run([*first, *self.tests], self.limit_s, cache)
        finally:
            file.write_bytes(source)
            kernels.write_text(unchanged)
            shutil.rmtree(self.work / "compiled-mutant", ignore_errors=True)
        if status is None:
            return "timeout", ""
        if status == 0:
            return "survived", ""
        failed = re.search(r"^FAILED (\S+?\.py::\w+)", output, re.MULTILINE)
        if failed is None:  # the mutant fails at import, or ends the process
            return "killed", f"status {status}: {output.strip()[-60:]}"
        self.detecting[failed[1]] += 1
        return "killed", failed[1]


def main() -> None:
    """Try a sample of mutants, and print the survivors and the share of killed ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, help="files and folders to change")
    parser.add_argument("--tests", nargs="+", required=True, help="files and folders of tests")
    parser.add_argument("--mutants", type=int, default=60, help="number of mutants to try")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--work", type=Path, default="/tmp/mutations", help="folder for the copy and results")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # exits through finally, which restores the sources
    (work := options.work.resolve()).mkdir(parents=True, exist_ok=True)
    sandbox = Sandbox(work, options.tests)
    folders = [sandbox.tree / path for path in options.sources]
    files = [file for folder in folders for file in (sorted(folder.rglob("*.py")) or [folder])]
    mutants = [each for file in files for each in mutants_of(str(file.relative_to(sandbox.tree)), file.read_bytes())]
    sample = random.Random(options.seed).sample(mutants, min(options.mutants, len(mutants)))
    results = work / "results.jsonl"
    known = {each["mutant"]: each for each in map(json.loads, results.open())} if results.exists() else {}
    counts: Counter[str] = Counter()
    for mutant in sample:
        key = json.dumps(asdict(mutant))
        if key not in known:
            outcome, detail = sandbox.try_mutant(mutant)
            known[key] = {"mutant": key, "outcome": outcome, "detail": detail}
            with results.open("a") as file:
                file.write(json.dumps(known[key]) + "\n")
            print(f"{outcome:8}  {mutant}  [{detail}]", flush=True)
        counts[known[key]["outcome"]] += 1
    print()
    for mutant in sample:
        if known[json.dumps(asdict(mutant))]["outcome"] == "survived":
            print(f"survived  {mutant}")
    killed = counts["killed"] + counts["timeout"]
    print(f"{killed} of {len(sample)} killed ({killed / max(len(sample), 1):.0%}), of {len(mutants)}: {dict(counts)}")


if __name__ == "__main__":
    main()
