"""Hooks: on activations, on gradients of parameters, and after their accumulation, to log norms."""

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
norms = {}
for name, one in model.named_parameters():
    one.register_hook(lambda gradient: gradient * 0.5)
    one.register_post_accumulate_grad_hook(lambda p, name=name: norms.update({name: p.grad.norm().item()}))
model[0].register_forward_hook(lambda _module, _inputs, output: output.clamp(-3, 3))
model[2].register_full_backward_hook(lambda *_: None)
job.state = {"model": model, "sgd": sgd}
ddp, optimizer = job.ddp(model), job.optimizer(sgd)

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    assert len(norms) == 4
    optimizer.step()
    job.record(loss)
job.finish()
