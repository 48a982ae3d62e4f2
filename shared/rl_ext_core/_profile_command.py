"""Run a script that trains with Stable Baselines3, and report where the time of each learn() goes.

The table is printed at the end of each learn(): environments, transfer, policy, buffer, update and callbacks. Only
training in this process is measured.

examples:
  rl-ext profile train.py
  rl-ext profile train.py --env CartPole-v1 --steps 20000
  rl-ext profile -m my_package.train --steps 20000
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import runpy
import sys
import types
from importlib.machinery import PathFinder, SourceFileLoader

from rl_ext_core.errors import InvalidArgumentError, RlExtError, _missing_dependency_error

_CALLBACK = "sb3_ext.timing_callback"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rl-ext profile``."""
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="module and its arguments, as python -m")
    parser.add_argument("script", metavar="SCRIPT", nargs="?", help="train.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")


def run(arguments: argparse.Namespace) -> int:
    """Run the script as ``python SCRIPT`` does, or a module as ``python -m MODULE``.

    :return: Exit status 0
    :raises SystemExit: With the exit status of the program if that is not 0
    :raises RlExtError: If the program ended without learn()
    :raises InvalidArgumentError: If there is no such script or module
    :raises MissingDependencyError: If Stable Baselines3 is not installed
    """
    name, *rest = arguments.module or [arguments.script, *arguments.arguments]
    is_module = bool(arguments.module)
    if name is None:
        raise InvalidArgumentError("no script was given; expected a Python script. Write rl-ext profile train.py")
    if not is_module and not os.path.isfile(name):
        raise InvalidArgumentError(f"{name!r} is not a file; expected a Python script, such as train.py")
    try:
        callback = importlib.import_module(_CALLBACK)
    except ImportError as error:
        raise _missing_dependency_error(error.name or "stable_baselines3", "sb3", "rl-ext profile") from error
    sys.argv = [name, *rest]
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11 and later have python -P
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(name))
    if is_module:
        _require_module(name)
    with callback.report_all_training() as trained:
        _run_program(name, is_module=is_module)
    if not trained:
        raise RlExtError(
            f"nothing was measured, because {name} did not call learn() of a Stable Baselines3 algorithm in this "
            "process; expected a script that trains. Write rl-ext profile train.py"
        )
    return 0


def _run_program(name: str, *, is_module: bool) -> None:
    """Run a script or module.

    :raises SystemExit: With the program's exit status if that is not 0. Python's hook has reported its exception
    """
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            _run_script(name)
    except SystemExit as end:
        if end.code:
            raise
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None


def _run_script(name: str) -> None:
    """Run a script in a new module ``__main__``, which remains, as workers and files of models refer to it.

    ``runpy.run_path`` is not used: it removes the module, and sets ``__file__`` to a relative path.
    """
    path = os.path.abspath(name)
    main = types.ModuleType("__main__")
    main.__file__, main.__loader__ = path, SourceFileLoader("__main__", path)
    sys.modules["__main__"] = main
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    exec(code, vars(main))


def _require_module(name: str) -> None:
    """Raise if there is no module of a name, or a package that has no ``__main__``."""
    try:
        found = importlib.util.find_spec(name)
        folders = None if found is None else found.submodule_search_locations
        if found is not None and (folders is None or PathFinder.find_spec(f"{name}.__main__", folders) is not None):
            return
        reason = "there is no such module" if found is None else f"the package has no module {name}.__main__"
    except (ImportError, ValueError) as error:  # from the package, or for a name such as ".train"
        reason = str(error)
    raise InvalidArgumentError(
        f"-m {name}: {reason}; expected a module that can be run, such as my_package.train. For a file, write "
        "rl-ext profile train.py"
    )
