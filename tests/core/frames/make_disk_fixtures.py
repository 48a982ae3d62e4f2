"""Writes the folders that ``test_disk_format`` opens. Run it once for a new format, and never again for a released one.

python -m tests.core.frames.make_disk_fixtures
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path

from rl_ext_core.frames.folder import FORMAT_VERSION
from tests.core.frames.disk_toys import add, open_store

DATA = Path(__file__).with_name("data")
KINDS = ("raw", "patch+lz4", "adaptive")
CAPACITY, N_STEPS = 30, 47


def path_of(kind: str) -> Path:
    """The file with the folder of a kind of store."""
    return DATA / f"folder-v{FORMAT_VERSION}-{kind}.zip"


def main() -> None:
    """Writes all files."""
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            options = {"codec": "patch", "n_stack": 3} if kind == "adaptive" else {}
            store, *rows = open_store(folder, kind, CAPACITY, **options)
            for number in range(N_STEPS):
                add(store, *rows, number)
            store.close()
            with zipfile.ZipFile(path_of(kind), "w", zipfile.ZIP_DEFLATED) as archive:
                for path in sorted(Path(folder).iterdir()):
                    archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)


if __name__ == "__main__":
    main()
