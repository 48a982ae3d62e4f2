"""Compare the memory of a replay buffer of images with each codec.

With --env, sizes are measured on up to 600 steps of a random policy. Without it they are estimates, marked as such.
The exit status is 0 if a codec fits, 1 if none fits or the environment fails, and 2 if the arguments are wrong.

examples:
  rl-ext plan --shape 100x100x9 --size 1000000
  rl-ext plan --env ale_py:ALE/Pong-v5 --size 1000000 --max-bytes 8GB
  rl-ext plan --env my_module:make_env --size 500000
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator

from rl_ext_core._environment_source import load_source
from rl_ext_core.errors import EnvironmentOutputError, InvalidArgumentError, RlExtError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``rl-ext plan``."""
    parser.add_argument("--shape", type=_parse_shape, help="shape of an observation as the buffer gets it: 100,100,9")
    parser.add_argument("--size", type=_parse_count, required=True, help="transitions over all environments: 1000000")
    parser.add_argument("--stack", type=_parse_count, help="frames per observation (default: detected)")
    parser.add_argument(
        "--envs", type=_parse_count, default=1, help="number of environments of the buffer (default: 1)"
    )
    parser.add_argument("--dtype", help="dtype of an observation, only without --env (default: uint8)")
    parser.add_argument("--env", metavar="ID|MODULE:FUNCTION", help="measure on this environment")
    parser.add_argument(
        "--steps", type=_parse_count, help="steps of the random policy (default: 600, fewer if frames are large)"
    )
    parser.add_argument("--max-bytes", metavar="SIZE", help="budget: 4GB, 512MiB (default: free memory)")
    parser.add_argument("--json", action="store_true", help="write the plan as JSON")


def _parse_shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; for example 100,100,9")
    return shape


def _parse_count(text: str) -> int:
    """Parse an integer from 1 to 10**15 - 1, such as ``1000000``, ``1_000_000``, ``1,000,000`` or ``1e6``."""
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        number = 0.0
    if not (1 <= number < 10**15 and number.is_integer() and text.isascii()):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1 to 10**15 - 1, for example 1000000")
    return int(number)


def run(arguments: argparse.Namespace) -> int:
    """Compute the memory of a replay buffer with each codec, and print it."""
    import numpy as np

    from rl_ext_core.factory import as_factory
    from rl_ext_core.frames.planning import parse_bytes, plan

    try:
        dtype = np.dtype(arguments.dtype or "uint8")
    except TypeError:
        raise InvalidArgumentError(f"--dtype {arguments.dtype!r} is not a NumPy dtype; for example uint8") from None
    if arguments.shape is None and arguments.env is None:
        raise InvalidArgumentError("pass --shape, for example --shape 100,100,9, or an environment with --env")
    if arguments.env is not None and arguments.dtype is not None:
        raise InvalidArgumentError(
            f"--dtype {arguments.dtype} cannot be used with --env, which has its own dtype; leave it out"
        )
    if arguments.env is None and arguments.steps is not None:
        raise InvalidArgumentError("--steps needs --env; pass an environment too, or leave it out")
    with contextlib.nullcontext() if arguments.env is None else _report_env_errors(arguments.env):
        source = None if arguments.env is None else load_source(arguments.env)
        found = plan(
            arguments.shape,
            arguments.size,
            dtype=dtype,
            n_stack=arguments.stack,
            n_envs=arguments.envs,
            env=as_factory(source) if isinstance(source, str) else source,
            steps=arguments.steps,
            max_bytes=None if arguments.max_bytes is None else parse_bytes(arguments.max_bytes),
        )
    sys.stdout.write(f"{json.dumps(found.as_dict(), indent=2) if arguments.json else found}\n")
    return 0 if found.fits else 1


@contextlib.contextmanager
def _report_env_errors(name: str) -> Iterator[None]:
    """Name the environment in its exceptions, and redirect its output to stderr: stdout is for the plan only."""
    sys.stdout.flush()
    output = os.dup(1)
    try:
        os.dup2(2, 1)  # C libraries write to descriptor 1
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except RlExtError:
        raise
    except (Exception, SystemExit) as error:  # environments can raise any exception
        raise EnvironmentOutputError(
            f"--env {name!r} raised {type(error).__name__}: {error} while it was created or stepped with random actions"
        ) from error
    finally:
        os.dup2(output, 1)
        os.close(output)
