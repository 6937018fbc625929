"""torch.func: parameters in a dict, gradients from grad(), and an update by hand, averaged by the script."""

import torch
from habit import start
from torch import nn
from torch.func import functional_call, grad_and_value

job = start()
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
weights = {name: one.detach().clone() for name, one in model.named_parameters()}
velocity = {name: torch.zeros_like(one) for name, one in weights.items()}


class Dicts:
    def state_dict(self):
        return {"weights": weights, "velocity": velocity}

    def load_state_dict(self, saved):
        weights.update(saved["weights"])
        velocity.update(saved["velocity"])


job.state = {"all": Dicts()}
loss_and_grads = grad_and_value(lambda w, x, y: nn.functional.mse_loss(functional_call(model, w, (x,)), y))

while job.current_step() < 10:
    x, y = job.batch()
    job.start_quorum()
    grads, loss = loss_and_grads(weights, x, y)
    for one in grads.values():
        job.average(one)
    with job.committing() as committed:
        if committed:
            for name, one in grads.items():
                velocity[name] = 0.9 * velocity[name] + one
                weights[name] = weights[name] - 0.05 * velocity[name]
    job.record(loss)
job.finish()
