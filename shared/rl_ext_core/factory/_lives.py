"""What environments do from a reset on: by this, one that was built anew is compared with one that was copied."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

from rl_ext_core.factory import _specs, _streams
from rl_ext_core.factory._drivers import driver_for
from rl_ext_core.factory._fingerprint import Fingerprint, fingerprint

__all__ = ["SEED", "Life", "live", "look"]

SEED = 20_231
_STEPS = 12
_LIFE_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class Life:
    """What a copy did, and what it was.

    :ivar returned: tokens of what it returned for a reset and each step, or the class of the exception that ended it
    :ivar begin: what it was after the reset
    :ivar end: what it was at last
    """

    returned: list[Any]
    begin: Fingerprint
    end: Fingerprint


def look(environment: Any, *, code: bool = False) -> Fingerprint:
    """Fingerprint an environment; what its wrappers have noted and do not go by is no difference.

    :param code: whether what its methods read beside it belongs to it
    """
    with _specs.without_notes(environment):
        return fingerprint(environment, code=code)


def live(environment: Any, steps: int | None = None) -> Life | None:
    """Reset a copy and step it.

    :param steps: how often; by default as often as a short time allows
    :return: None if how to step it is not known
    """
    driver = driver_for(environment, seed=SEED)
    if driver is None:
        return None
    # Building has drawn from the process's generators in one way of building, and has not in another.
    _streams.seed_process(_streams.sequence(SEED, 1))
    returned, begin = [_tokens(driver.reset, SEED)], look(environment)
    until = time.monotonic() + _LIFE_SECONDS
    while not isinstance(returned[-1], str) and len(returned) <= (_STEPS if steps is None else steps):
        if steps is None and time.monotonic() > until:
            break
        returned.append(_tokens(driver.step))
    return Life(returned, begin, look(environment))


def _tokens(act: Any, *args: Any) -> Any:
    try:
        return fingerprint(act(*args)).tokens
    except Exception as error:  # a copy is to raise what the original raises
        return type(error).__qualname__
