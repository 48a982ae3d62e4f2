"""Log the process and the seed of each simulator; Python imports this module first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

if "LAB2D_LOG" in os.environ:
    import dmlab2d

    build = dmlab2d.Lab2d

    def build_and_log(runfiles_root: str, settings: Mapping[str, str]) -> Any:
        """Build a simulator, and log the process id and the simulator's seed."""
        with open(os.environ["LAB2D_LOG"], "a") as log:
            log.write(f"{os.getpid()} {settings['env_seed']}\n")
        return build(runfiles_root, settings)

    dmlab2d.Lab2d = build_and_log
