"""Shows a report on a terminal. Lines to copy are never wrapped, and nothing is cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from rl_ext_core.devices.doctor import _words

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from rl_ext_core.devices.doctor._report import Report

_STYLES = {"error": "bold red", "warning": "yellow", "ok": "green"}
_FOLDED_FROM = 24


def show(report: Report, console: Console) -> None:
    """Print a report, section by section; those that have nothing to say are left out."""
    _line(console, _words.versions(report))
    _grid(console, _words.GPU_COLUMNS, _words.gpu_rows(report))
    for text in _words.other_devices(report):
        _line(console, text)
    _heading(console, "compute")
    for text in _words.compute(report):
        _line(console, text)
    if report.renderers:
        _heading(console, "renderers with the present variables")
        _grid(console, _words.RENDERER_COLUMNS, _words.renderer_rows(report))
    for advice in report.advice:
        _line(console, advice.text)
        if advice.line is not None:
            _line(console, advice.line, "bold")
    _decision(report, console)
    verified(report, console)
    _findings(report, console)
    _fixes(report, console)


def verified(report: Report, console: Console) -> None:
    """Print what was seen when renderers were tried."""
    if report.verified:
        _heading(console, "tried under a decision, each in a process of its own")
        _grid(console, _words.VERIFIED_COLUMNS, _words.verified_rows(report))


def _decision(report: Report, console: Console) -> None:
    if report.question is None:
        return
    _heading(console, _words.question(report.question))
    if report.refusal is not None:
        _line(console, f"refused  {report.refusal}", _STYLES["error"])
    if report.decision is not None:
        for line in report.decision.explain().splitlines():
            _line(console, line)


def _findings(report: Report, console: Console) -> None:
    _heading(console, "findings")
    if not report.findings:
        _line(console, "nothing is wrong with the variables", _STYLES["ok"])
    for finding in report.findings:
        grid = Table.grid(padding=(0, 1))
        severity = Text(finding.severity, _STYLES[finding.severity])
        grid.add_row(severity, Text(clean(_words.finding(finding)), overflow="fold"))
        console.print(grid)
        for line in finding.fix.splitlines():
            _line(console, line, "bold")


def _fixes(report: Report, console: Console) -> None:
    for fix in report.fixes:
        _heading(console, f"to copy, {fix.purpose}")
        for line in fix.lines:
            _line(console, line, "bold")


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(clean(text), "bold cyan"), highlight=False)


def _line(console: Console, text: str, style: str = "") -> None:
    """Print a line that the terminal may break, and nobody else: what is copied from there is one line."""
    console.print(Text(clean(text), style), soft_wrap=True, highlight=False)


def _grid(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, or paragraphs where it would not fit; the last column holds sentences and is folded."""
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True)
    longest = max(len(row[-1]) for row in rows)
    table.add_column(columns[-1], overflow="fold", min_width=min(longest, _FOLDED_FROM))
    for row in rows:
        table.add_row(*(Text(clean(cell)) for cell in row))
    if _fits(columns, rows, console):
        console.print(table, highlight=False)
        return
    for row in rows:
        for text in _paragraph(columns, row):
            _line(console, text)


def _fits(columns: Sequence[str], rows: Sequence[Sequence[str]], console: Console) -> bool:
    widths = [max(len(column), *(len(row[place]) for row in rows)) + 2 for place, column in enumerate(columns)]
    return sum(widths[:-1]) + min(widths[-1], _FOLDED_FROM) <= console.width


def _paragraph(columns: Sequence[str], row: Sequence[str]) -> Iterator[str]:
    yield f"{columns[0]} {row[0]}"
    for column, cell in zip(columns[1:], row[1:], strict=True):
        yield f"  {column}: {cell}"


def clean(text: str) -> str:
    """Show characters that are none as Python writes them: a report may come from anybody."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
