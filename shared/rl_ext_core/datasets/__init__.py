"""Datasets of episodes: read one episode at a time, and write Minari datasets."""

from __future__ import annotations

from rl_ext_core.datasets.episodes import Dataset, Episode
from rl_ext_core.datasets.minari_format import write_dataset
from rl_ext_core.datasets.sources import open_dataset

__all__ = ["Dataset", "Episode", "open_dataset", "write_dataset"]
