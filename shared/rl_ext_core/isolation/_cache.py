"""Keeps verdicts in the user's cache folder, each with what has to be unchanged for it to hold."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_ext_core.errors import RlExtError
from rl_ext_core.factory import EnvFactory
from rl_ext_core.isolation import _loaded
from rl_ext_core.isolation._key import key_of
from rl_ext_core.isolation.verdict import Isolation, Verdict

__all__ = ["Cache"]

_log = logging.getLogger("rl_ext_core.isolation")
_FORMAT = 1
# Another time it may be otherwise.
_NOT_KEPT = (Isolation.NON_DETERMINISTIC, Isolation.BROKEN)


@dataclasses.dataclass(frozen=True)
class Cache:
    """The place of one recipe's verdict. Whatever is wrong with it, it is as if nothing were there.

    :ivar path: of the file
    :ivar steps: that a verdict must have looked at, at least
    """

    path: Path
    steps: int

    @classmethod
    def of(cls, factory: EnvFactory[Any], where: bool | str | os.PathLike[str], steps: int) -> Cache | None:
        """Find the place.

        :param factory: builds the environment
        :param where: True is the user's cache folder, a path another one, False none
        :return: None: nothing is kept of it
        """
        folder = _users_folder() if where is True else None if where is False else Path(where)
        key = None if folder is None else key_of(factory, _FORMAT)
        return None if folder is None or key is None else cls(folder / f"{key}.json", steps)

    def read(self) -> Verdict | None:
        """Give the verdict, if there is one and what it was found on is still the same."""
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            if kept["format"] != _FORMAT:
                return None
            verdict = Verdict.from_json(json.dumps(kept["verdict"]))
            holds = (
                verdict.isolation not in _NOT_KEPT
                and (kept["steps"] >= self.steps or verdict.isolation is not Isolation.INDEPENDENT)
                and all(_state_of(path) == state for path, state in kept["files"].items())
                and all(_loaded.version_of(name) == version for name, version in kept["distributions"].items())
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RlExtError) as error:
            _log.debug("no verdict in %s: %r", self.path, error)
            return None
        return dataclasses.replace(verdict, declared_by="cache") if holds else None

    def write(self, verdict: Verdict, measured: Mapping[str, Any]) -> None:
        """Keep a verdict.

        :param verdict: of a probe
        :param measured: by it: which files and distributions it depends on
        """
        files = {path: _state_of(path) for path in (*measured.get("libraries", ()), *measured.get("sources", ()))}
        # A library that was loaded from a temporary folder, and is gone, may be another one next time.
        if verdict.isolation in _NOT_KEPT or None in files.values() or "distributions" not in measured:
            return
        kept = {
            "format": _FORMAT,
            "steps": self.steps,
            "verdict": json.loads(verdict.to_json()),
            "files": files,
            "distributions": measured["distributions"],
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _write(self.path, json.dumps(kept, indent=1))
        except OSError as error:
            _log.debug("%s cannot be written: %r", self.path, error)


def _users_folder() -> Path | None:
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:  # nobody's
        return None
    return base / "rl-ext" / "isolation"


def _write(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _state_of(path: str) -> list[int] | None:
    try:
        state = os.stat(path)
    except (OSError, ValueError):
        return None
    return [state.st_mtime_ns, state.st_size]
