"""stable-baselines3: PPO, DQN and SAC in gymnasium's environments."""

import numpy as np
from stable_baselines3 import DQN, PPO, SAC

LIBRARIES = ("stable-baselines3", "gymnasium")


def program():
    ppo = PPO(
        "MlpPolicy", "CartPole-v1", n_steps=16, batch_size=8, n_epochs=1, device="cuda", seed=3
    )
    shared = {
        "learning_starts": 8,
        "buffer_size": 100,
        "batch_size": 8,
        "device": "cuda",
        "seed": 3,
    }
    dqn = DQN("MlpPolicy", "CartPole-v1", train_freq=4, target_update_interval=20, **shared)
    sac = SAC("MlpPolicy", "Pendulum-v1", **shared)
    agents = [ppo.learn(16), dqn.learn(24), sac.learn(14)]
    assert all(next(agent.policy.parameters()).is_cuda for agent in agents)
    action, _ = ppo.predict(np.zeros((1, 4), "float32"), deterministic=True)
    return [agent.policy.state_dict() for agent in agents], action
