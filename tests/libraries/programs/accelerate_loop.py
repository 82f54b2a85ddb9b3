"""accelerate: accumulation in bfloat16, clipping, gathered losses, a saved state."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn

LIBRARIES = ("accelerate",)


def program():
    set_seed(4)
    helper = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    model = nn.Sequential(
        nn.Embedding(30, 8),
        nn.Flatten(),
        nn.Linear(48, 16),
        nn.Dropout(0.1),
        nn.GELU(),
        nn.Linear(16, 3),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rows = [(torch.randint(0, 30, (6,)), row % 3) for row in range(27)]
    loader = torch.utils.data.DataLoader(rows, batch_size=6, shuffle=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
    model, optimizer, loader, schedule = helper.prepare(model, optimizer, loader, schedule)
    losses = []
    for _ in range(2):
        for words, kind in loader:
            with helper.accumulate(model):
                loss = nn.functional.cross_entropy(model(words), kind)
                helper.backward(loss)
                if helper.sync_gradients:
                    helper.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            losses.append(helper.gather_for_metrics(loss.detach()).mean())
    helper.save_state("state")
    helper.load_state("state")
    assert words.is_cuda
    return helper.unwrap_model(model).state_dict(), losses
