"""Write a replay buffer as a Minari dataset.

SOURCE is a storage_dir, or a replay buffer that model.save_replay_buffer wrote (.pkl). Open only .pkl files from people
you trust, because they can run code. DATASET is a Minari id, or a folder to create.

examples:
  rl-ext export run1 pendulum/mine-v0 --env Pendulum-v1
  rl-ext export run1 datasets/pong --env my_module:make_env --format arrow
  rl-ext export buffer.pkl cartpole/mine-v0
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_ext_core._environment_source import create_env
from rl_ext_core._import_command import load_adapter
from rl_ext_core._plan_command import _report_env_errors
from rl_ext_core.cli import show_progress
from rl_ext_core.errors import InvalidArgumentError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rl-ext export``."""
    parser.add_argument("source", metavar="SOURCE", help="storage_dir, or saved replay buffer (.pkl)")
    parser.add_argument("dataset", metavar="DATASET", help="Minari id, or folder to create")
    parser.add_argument("--env", metavar="ID|MODULE:FUNCTION", help="environment with the spaces of a storage_dir")
    parser.add_argument(
        "--format", choices=("hdf5", "arrow", "parquet"), default="hdf5", help="file format (default: hdf5)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the dataset, and print its folder.

    :return: Exit status
    :raises RlExtError: If the source cannot be read, or the dataset cannot be written
    """
    source = Path(arguments.source)
    is_folder = source.is_dir()
    if not is_folder and not source.is_file():
        raise InvalidArgumentError(f"{arguments.source!r} does not exist, expected a storage_dir or a .pkl file")
    if is_folder and arguments.env is None:
        raise InvalidArgumentError(
            f"{arguments.source!r} does not contain its spaces; pass its environment, for example --env Pendulum-v1"
        )
    if not is_folder and arguments.env is not None:
        raise InvalidArgumentError(
            f"--env {arguments.env} is for a storage_dir, and {arguments.source!r} contains its spaces; leave it out"
        )
    options = _read_options(source) if is_folder else {}
    adapter = load_adapter("torchrl" if "max_size" in options else "sb3")
    with _report_env_errors(arguments.env):
        env = create_env(arguments.env) if is_folder else None
    from rl_ext_core.datasets import write_dataset

    opened = adapter.open_export(source, options, env)
    try:
        with show_progress(f"writing {arguments.dataset}", opened.n_steps) as report:

            def report_episodes() -> Iterator[Any]:
                """Yield the episodes, and report their steps."""
                for episode in opened.episodes:
                    yield episode
                    report(len(episode))

            spaces = opened.observation_space, opened.action_space
            folder = write_dataset(arguments.dataset, report_episodes(), *spaces, data_format=arguments.format)
    finally:
        opened.close()
        getattr(env, "close", lambda: None)()
    sys.stdout.write(f"{folder}\n")
    return 0


def _read_options(folder: Path) -> dict[str, Any]:
    """Read the options that a ``storage_dir`` was created with; for a Dict, a dict of them by the name of its folder.

    :raises InvalidArgumentError: If there is not a store in the folder
    :raises CorruptFileError: If its settings are damaged
    """
    from rl_ext_core.frames.folder import FORMAT_VERSION, MANIFEST, read_json

    if (folder / MANIFEST).is_file():
        options: dict[str, Any] = read_json(folder / MANIFEST, FORMAT_VERSION)["options"]
        return options
    parts = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    if not parts:
        raise InvalidArgumentError(f"{str(folder)!r} does not contain a store, expected the storage_dir of a buffer")
    return {path.name: read_json(path / MANIFEST, FORMAT_VERSION)["options"] for path in parts}
