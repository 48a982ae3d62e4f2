"""Record episodes, so that they can be repeated: after a crash, or to resume a run."""

from rl_ext_core.recording.episode_log import EpisodeLog, Repetition
from rl_ext_core.recording.recorder import EpisodeRecorder

__all__ = ["EpisodeLog", "EpisodeRecorder", "Repetition"]
