"""Train with rl-zoo3 on ``AutoVecEnv``, in this process or in shared-memory workers.

rl-zoo3's option ``--vec-env`` accepts only SB3's classes.

    python examples/rl_zoo3_train.py --algo ppo --env CartPole-v1
"""

import rl_zoo3.train
from rl_zoo3.exp_manager import ExperimentManager

from sb3_ext import AutoVecEnv

ExperimentManager.default_vec_env_cls = AutoVecEnv

if __name__ == "__main__":
    rl_zoo3.train.train()
