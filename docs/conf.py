"""How the site is built: ``make docs``."""

from __future__ import annotations

import shutil
import socket
import sys
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

project = "rl-ext"
author = "rl-ext contributors"
copyright = f"2026, {author}"
release = version = metadata.version("rl-ext")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
    "myst_nb",
    "site_directives",
]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}

# -- pages

myst_heading_anchors = 4
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# -- notebooks: those of examples/, with the outputs that scripts/run_notebooks.py stored in them

NOTEBOOKS = HERE / "notebooks"
NOTEBOOKS.mkdir(exist_ok=True)
for example in (ROOT / "examples").iterdir():
    if example.suffix in (".ipynb", ".py"):
        shutil.copy2(example, NOTEBOOKS / example.name)
nb_execution_mode = "off"

# -- the reference

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True}
python_use_unqualified_type_names = True

_INVENTORIES = {
    "python": "https://docs.python.org/3/",
    "numpy": "https://numpy.org/doc/stable/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "gymnasium": "https://gymnasium.farama.org/",
    "stable_baselines3": "https://stable-baselines3.readthedocs.io/en/master/",
    "torchrl": "https://docs.pytorch.org/rl/stable/",
}


def _online() -> bool:
    try:
        socket.create_connection(("docs.python.org", 443), timeout=2).close()
    except OSError:
        return False
    return True


# Without a network the site is the same, except for links into other sites' references.
intersphinx_mapping = {name: (address, None) for name, address in _INVENTORIES.items()} if _online() else {}
intersphinx_timeout = 10
linkcheck_ignore = [r"https?://"]  # those inside; others' sites come and go

# -- appearance

html_theme = "furo"
html_title = "rl-ext"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "_static" / "scorer.js")
