"""Script that runs with a TorchRL in which one private name is renamed.

    python tests/torchrl_ext/renamed_torchrl.py NAME

Every source file of TorchRL and TensorDict is loaded with NAME replaced by another name. It prints the warnings, and
rollouts of each class.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import re
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_LATER = "_of_later"


class RenamingLoader(importlib.machinery.SourceFileLoader):
    """Loader that replaces one name in a module's source, without a bytecode cache."""

    removed_name = ""

    def get_code(self, fullname: str) -> Any:
        source = self.get_data(self.get_filename(fullname)).decode()
        changed = re.sub(rf"\b{self.removed_name}\b", self.removed_name + _LATER, source)
        return compile(changed, self.get_filename(fullname), "exec", dont_inherit=True)


class RenamingFinder(importlib.abc.MetaPathFinder):
    """Finder that loads both libraries' modules with ``RenamingLoader``."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname.partition(".")[0] not in ("torchrl", "tensordict"):
            return None
        # A module may have the name as well, but its file is not renamed.
        spec = importlib.machinery.PathFinder.find_spec(fullname.replace(_LATER, ""), path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.name, spec.loader = fullname, RenamingLoader(fullname, spec.loader.path)
        return spec


def make_env() -> Any:
    """Make a CartPole."""
    import gymnasium

    return gymnasium.make("CartPole-v1")


def rollout(env: Any) -> list[Any]:
    """Return the observations of five seeded steps."""
    import torch

    env.set_seed(3)
    torch.manual_seed(0)
    found = env.rollout(5, break_when_any_done=False)["observation"].tolist()
    env.close()
    return list(found)


def main() -> None:
    """Rename a private name of TorchRL, and print warnings and rollouts as JSON."""
    RenamingLoader.removed_name = sys.argv[1]
    sys.meta_path.insert(0, RenamingFinder())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torchrl_ext
    messages = [str(warning.message) for warning in caught if "rl-ext" in str(warning.message)]
    from torchrl.envs import GymWrapper, SerialEnv

    single = rollout(torchrl_ext.GymWrapper(make_env())), rollout(GymWrapper(make_env()))
    workers = rollout(torchrl_ext.ParallelEnv(2, make_env())), rollout(SerialEnv(2, lambda: GymWrapper(make_env())))
    sys.stdout.write(json.dumps({"messages": messages, "single": single, "workers": workers}) + "\n")


if __name__ == "__main__":
    main()
