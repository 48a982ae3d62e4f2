"""``python -m rl_ext_core``: the command line where ``rl-ext`` is not on the PATH."""

from __future__ import annotations

import sys

from rl_ext_core.cli import main

if __name__ == "__main__":
    sys.exit(main())
