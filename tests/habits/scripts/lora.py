"""LoRA: adapters on a frozen base, of which only the adapters are saved and registered."""

import torch
from habit import start
from torch import nn


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


job = start()
torch.manual_seed(1)  # stands for a file of the base
model = nn.Sequential(Lora(nn.Linear(8, 16)), nn.Tanh(), Lora(nn.Linear(16, 1)))
adamw = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)


class Adapters:
    def state_dict(self):
        return {name: one for name, one in model.state_dict().items() if ".base." not in name}

    def load_state_dict(self, saved):
        model.load_state_dict(saved, strict=False)


job.state = {"adapters": Adapters(), "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
