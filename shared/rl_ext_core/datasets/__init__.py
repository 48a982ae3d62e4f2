"""Minari datasets: read one episode at a time, and write."""

from rl_ext_core.datasets.episodes import Episode
from rl_ext_core.datasets.minari_format import Dataset, open_dataset, write_dataset

__all__ = ["Dataset", "Episode", "open_dataset", "write_dataset"]
