"""Add a layer, and a param group for it, in the middle of the training."""

import torch
from habit import start
from torch import nn

job = start(kill_at=6)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def grow():
    torch.manual_seed(1)
    layer = nn.Linear(16, 16)
    model.insert(2, layer)
    sgd.add_param_group({"params": layer.parameters(), "lr": 0.02})


class Growing:
    """The model and its optimizer. A group that comes back makes the layer before it loads a state that has it."""

    def state_dict(self):
        return {"model": model.state_dict(), "sgd": sgd.state_dict()}

    def load_state_dict(self, saved):
        if len(saved["sgd"]["param_groups"]) > len(sgd.param_groups):
            grow()
        model.load_state_dict(saved["model"])
        sgd.load_state_dict(saved["sgd"])


job.state = {"all": Growing()}
ddp, optimizer = job.ddp(model), job.optimizer(sgd)

while job.current_step() < 16:
    if job.current_step() >= 4 and len(sgd.param_groups) == 1:
        grow()
        ddp = job.ddp(model) if job.groups == 1 or not hasattr(ddp, "_keepstep_manager") else ddp
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
