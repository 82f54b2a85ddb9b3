"""torchrl: a replay buffer on the device, DQN with a slow target, GAE and PPO losses."""

import sys

# recbole pins a ray that no longer imports; torchrl does without one that is not there.
sys.modules.setdefault("ray", None)

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from tensordict.nn import TensorDictModule  # noqa: E402
from torch.distributions import Categorical  # noqa: E402
from torchrl.data import LazyTensorStorage, OneHot, TensorDictReplayBuffer  # noqa: E402
from torchrl.modules import MLP, ProbabilisticActor, QValueActor, ValueOperator  # noqa: E402
from torchrl.objectives import ClipPPOLoss, DQNLoss, SoftUpdate  # noqa: E402
from torchrl.objectives.value import GAE  # noqa: E402

LIBRARIES = ("torchrl", "tensordict")


def later(*shape):
    ended = torch.zeros(*shape, 1, dtype=torch.bool, device="cuda")
    return TensorDict(
        {
            "observation": torch.randn(*shape, 3, device="cuda"),
            "reward": torch.randn(*shape, 1, device="cuda"),
            "done": ended,
            "terminated": ended.clone(),
        },
        shape,
    )


def program():
    actions = torch.nn.functional.one_hot(torch.randint(0, 2, (40,), device="cuda"), 2)
    seen = {"observation": torch.randn(40, 3, device="cuda"), "action": actions, "next": later(40)}
    memory = TensorDictReplayBuffer(storage=LazyTensorStorage(50, device="cuda"), batch_size=8)
    memory.extend(TensorDict(seen, [40]))
    kind = OneHot(2, device="cuda")
    net = {"in_features": 3, "num_cells": [8], "device": "cuda"}
    actor = QValueActor(MLP(out_features=2, **net), in_keys=["observation"], spec=kind)
    loss_of = DQNLoss(actor, action_space=kind, delay_value=True)
    loss_of.make_value_estimator(gamma=0.95)
    optimizer, target = torch.optim.Adam(loss_of.parameters()), SoftUpdate(loss_of, eps=0.9)
    for _ in range(3):
        loss = loss_of(memory.sample())["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        target.step()
    scores = TensorDictModule(
        MLP(out_features=3, **net), in_keys=["observation"], out_keys=["logits"]
    )
    policy = ProbabilisticActor(
        scores, in_keys=["logits"], distribution_class=Categorical, return_log_prob=True
    )
    value = ValueOperator(MLP(out_features=1, **net), in_keys=["observation"])
    steps = TensorDict(
        {"observation": torch.randn(4, 6, 3, device="cuda"), "next": later(4, 6)}, [4, 6]
    )
    with torch.no_grad():
        steps = policy(steps)
    GAE(gamma=0.95, lmbda=0.9, value_network=value)(steps)
    surrogate = ClipPPOLoss(policy, value)
    optimizer = torch.optim.Adam(surrogate.parameters())
    for _ in range(2):
        parts = surrogate(steps.reshape(-1))
        sum(parts[name] for name in ("loss_objective", "loss_critic", "loss_entropy")).backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss, actor.state_dict(), policy.state_dict(), value.state_dict(), steps["action"]
