"""Store a dataset in the storage_dir of a replay buffer, compressed.

DATASET is a Minari id, or the folder of a dataset. FOLDER must not contain a buffer. The line that opens it is printed.

examples:
  rl-ext import atari/pong/expert-v0 pong --for sb3 --download
  rl-ext import recordings/run1 run1 --for torchrl --codec patch+lz4
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import Any

from rl_ext_core._plan_command import _parse_count
from rl_ext_core.cli import show_progress
from rl_ext_core.errors import InvalidArgumentError, _missing_dependency_error

ADAPTERS = {"sb3": "sb3_ext.datasets", "torchrl": "torchrl_ext.datasets"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rl-ext import``."""
    parser.add_argument("dataset", metavar="DATASET", help="Minari id, or folder of a dataset")
    parser.add_argument("folder", metavar="FOLDER", help="storage_dir to create")
    parser.add_argument(
        "--for", dest="library", choices=(*ADAPTERS,), required=True, help="library whose buffer opens the folder"
    )
    parser.add_argument("--size", type=_parse_count, help="buffer_size or max_size (default: steps of the dataset)")
    parser.add_argument("--envs", type=_parse_count, help="n_envs of the buffer, for sb3 only (default: 1)")
    parser.add_argument("--codec", default="auto", help="codec of the images (default: auto)")
    parser.add_argument("--download", action="store_true", help="download the dataset if it is not on this machine")


def run(arguments: argparse.Namespace) -> int:
    """Store the dataset, and print the line that opens the folder.

    :return: Exit status
    :raises RlExtError: If the dataset cannot be read, or the folder cannot be created
    """
    if arguments.envs is not None and arguments.library != "sb3":
        raise InvalidArgumentError(f"--envs {arguments.envs} needs --for sb3; leave it out")
    adapter = load_adapter(arguments.library)
    from rl_ext_core.datasets import open_dataset

    dataset = open_dataset(arguments.dataset, download=arguments.download)
    options = {"size": arguments.size, "codec": arguments.codec}
    if arguments.envs is not None:
        options["n_envs"] = arguments.envs
    with show_progress(f"storing {dataset.name}", dataset.n_steps) as report:
        dataset.report = report
        line = adapter.import_folder(dataset, arguments.folder, **options)
    sys.stdout.write(f"{line}\n")
    return 0


def load_adapter(library: str) -> Any:
    """Import the module that converts datasets for a library.

    :param library: A key of ``ADAPTERS``
    :raises MissingDependencyError: If the library is not installed
    """
    try:
        return importlib.import_module(ADAPTERS[library])
    except ImportError as error:
        raise _missing_dependency_error(error.name or library, library, f"a buffer for {library}") from error
