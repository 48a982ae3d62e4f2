"""Make small changes of the sources, one at a time, and list those that no test detects.

    pip install pytest-cov
    python scripts/mutations.py shared/rl_ext_core/frames --tests tests/core/frames tests/sb3_ext/test_replay_buffer.py

Everything happens in a copy of the tree. The tests run once to record the lines that each of them executes. Then each
mutant runs with the tests that execute its line, until one fails. The same command continues an interrupted run.
Another ``--work`` folder starts over.

Coverage misses lines that numba compiles and lines in other processes. Therefore each mutant also runs with the tests
named by ``--otherwise``. Mutants of code that kills processes may kill any process. For these, put
``unshare --pid --fork --mount-proc`` before the command.
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
import sqlite3
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from coverage.numbits import numbits_to_nums

ROOT = Path(__file__).resolve().parent.parent
COMPILED = ("njit", "kernel", "intrinsic")
# Any change in this folder invalidates the cache of machine code; the replacement avoids compiling for every mutant.
DIGEST = (
    "shared/rl_ext_core/frames/kernel_primitives.py",
    "_DIGEST = sources_digest(Path(__file__).parent)",
    '_DIGEST = "none"',
)
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
    """Copy of the tree, with the lines and the duration of each test."""

    def __init__(self, work: Path, tests: list[str]) -> None:
        self.work, self.tree, self.record = work, work / "tree", work / "coverage"
        self.passing_unchanged, self.failing_unchanged = (
            set[str](),
            set[str](),
        )  # Tests that pass, and that fail, without any mutant.
        if not self.tree.exists():
            folders = shutil.ignore_patterns(".git", ".venv", "out", "__pycache__", ".*_cache", ".hypothesis")
            shutil.copytree(ROOT, self.tree, ignore=folders)
        if not self.record.exists():
            packages = ["--cov=shared/rl_ext_core", "--cov=sb3_ext", "--cov=torchrl_ext"]
            options = ["--cov-context=test", "--cov-report=", "--durations=0", "--durations-min=0", "-mnot exhaustive"]
            _, output = self.run([*packages, *options, *tests], 7200, COVERAGE_FILE=str(work / "recording"))
            (work / "durations").write_text(output)
            (work / "recording").rename(self.record)
        self.durations: dict[str, float] = defaultdict(float)
        for seconds, test in re.findall(r"^([\d.]+)s \w+ +(\S.*)$", (work / "durations").read_text(), re.MULTILINE):
            self.durations[test] += float(seconds)

    def run(self, arguments: list[str], limit: float, **variables: str) -> tuple[int | None, str]:
        """Run pytest in the copy, and return its status (None after a timeout) and output."""
        variables |= {"PYTHONPATH": f"{self.tree}:{self.tree / 'shared'}", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        options = {"cwd": self.tree, "env": os.environ | variables, "start_new_session": True}
        with (output := self.work / "output").open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, **options)
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                status = None
        return status, output.read_text(errors="replace")

    def tests_of(self, mutant: Mutant, otherwise: list[str], seconds: float) -> list[str]:
        """Return the tests for a mutant, as many as fit into ``seconds``.

        First comes one case of each test that executes the line. Then come the tests named by ``otherwise``, since the
        line may run in a process without coverage, and then the remaining cases.
        """
        passing = (
            "select context, numbits from line_bits join context on context.id = context_id "
            "join file on file.id = file_id where path like ?"
        )
        tests = set()
        with contextlib.closing(sqlite3.connect(self.record)) as database:
            for context, bits in database.execute(passing, (f"%/{mutant.path}",)):
                if mutant.line in numbits_to_nums(bits):
                    tests.add(context.partition("|")[0])
        others = {test for test in self.durations if test.startswith(tuple(otherwise))}
        inside, outside = (
            sorted(group - {""} - self.failing_unchanged, key=lambda each: (self.durations[each], each))
            for group in (tests, others - tests)
        )
        firsts = list({test.partition("[")[0]: test for test in reversed(inside)}.values())
        chosen: list[str] = []
        own = [test for test in firsts if test in others]
        for test in dict.fromkeys([*reversed(own), *outside, *reversed(firsts), *inside]):
            seconds -= self.durations[test] + 0.01
            if seconds > 0 or not chosen:
                chosen.append(test)
        return chosen

    def try_mutant(self, mutant: Mutant, otherwise: list[str], seconds: float) -> tuple[str, str]:
        """Run the tests of a mutant, and return whether one of them detects it.

        :return: ``killed``, ``timeout``, ``survived`` or ``no test``; and the failed test or the number of tests.
        """
        file = self.tree / mutant.path
        source, machine = file.read_bytes(), self.tree / DIGEST[0]
        digest = machine.read_text()
        has_kernels = any(f"@{name}" in source.decode() for name in COMPILED)
        cache = self.work / ("compiled-mutant" if has_kernels else "compiled")
        try:
            while tests := self.tests_of(mutant, otherwise, seconds):
                (self.work / "names").write_text("\n".join(tests))
                if not has_kernels:
                    machine.write_text(digest.replace(*DIGEST[1:]))
                file.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.stop :])
                limit = 3 * seconds + 120
                arguments = ["-x", "-m", "", "--tb=no", "-rfE", f"@{self.work / 'names'}"]
                status, output = self.run(arguments, limit, NUMBA_CACHE_DIR=str(cache))
                file.write_bytes(source)
                if "(no match in any of" in output:
                    sys.exit(f"the coverage in --work is of other tests. Pass another --work: {output.strip()[-200:]}")
                if status is None:
                    return "timeout", f"{len(tests)} tests"
                if status == 0:
                    return "survived", f"{len(tests)} tests"
                failed = re.search(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.+?)?)(?: - .*)?$", output, re.MULTILINE)
                if failed is None or "::" not in failed[1]:  # failed during imports, or with the whole process
                    return "killed", f"status {status}: {output.strip()[-60:]}"
                if failed[1] not in self.passing_unchanged:
                    alone, _ = self.run(["-m", "", failed[1]], limit, NUMBA_CACHE_DIR=str(self.work / "compiled"))
                    (self.failing_unchanged if alone else self.passing_unchanged).add(failed[1])
                if failed[1] in self.passing_unchanged:
                    return "killed", failed[1]
            return "no test", ""
        finally:
            file.write_bytes(source)
            machine.write_text(digest)
            shutil.rmtree(self.work / "compiled-mutant", ignore_errors=True)


def main() -> None:
    """Try a sample of mutants, and print the survivors and the share of killed ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", type=Path, help="files and folders to change")
    parser.add_argument("--tests", nargs="+", required=True, help="files and folders of tests")
    parser.add_argument(
        "--otherwise", nargs="+", default=["tests/core/frames/"], help="prefixes of tests for every mutant"
    )
    parser.add_argument("--mutants", type=int, default=60, help="number of mutants to try")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument("--seconds", type=float, default=60, help="seconds of tests per mutant")
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
            outcome, detail = sandbox.try_mutant(mutant, options.otherwise, options.seconds)
            known[key] = {"mutant": key, "outcome": outcome, "detail": detail}
            with results.open("a") as file:
                file.write(json.dumps(known[key]) + "\n")
            print(f"{outcome:8}  {mutant}  [{detail}]", flush=True)
        counts[known[key]["outcome"]] += 1
    print()
    for mutant in sample:
        if (result := known[json.dumps(asdict(mutant))])["outcome"] in ("survived", "no test"):
            print(f"{result['outcome']:8}  {mutant}  [{result['detail']}]")
    killed = counts["killed"] + counts["timeout"]
    print(f"{killed} of {len(sample)} killed ({killed / max(len(sample), 1):.0%}), of {len(mutants)}: {dict(counts)}")


if __name__ == "__main__":
    main()
