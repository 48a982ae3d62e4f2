"""Entry point of ``python -m rl_ext_core``, the same command line as ``rl-ext``."""

from __future__ import annotations

import sys

from rl_ext_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
