"""rl-zoo3's training with workers that share memory, where the environments allow only one instance per process or
their steps take long enough; its option ``--vec-env`` knows SB3's classes only.

    python examples/rl_zoo3_train.py --algo ppo --env CartPole-v1
"""

import rl_zoo3.train
from rl_zoo3.exp_manager import ExperimentManager

from sb3_ext import AutoVecEnv

ExperimentManager.default_vec_env_cls = AutoVecEnv

if __name__ == "__main__":
    rl_zoo3.train.train()
