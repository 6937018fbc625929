"""An actor and a critic, with an optimizer each and rollouts of uneven length, which learn in one step."""

import time

import torch
from habit import start
from torch import nn

job = start()
actor = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
critic = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adam_a, adam_c = torch.optim.Adam(actor.parameters(), 3e-3), torch.optim.RMSprop(critic.parameters(), 3e-3)
job.state = {"actor": actor, "critic": critic, "adam_a": adam_a, "adam_c": adam_c}
ddp_a, ddp_c = job.ddp(actor), job.ddp(critic)
optimizer_a, optimizer_c = job.optimizer(adam_a), job.optimizer(adam_c)

while job.current_step() < 10:
    step = job.current_step()
    time.sleep(0.01 * ((step + job.group) % 3))  # an episode that ends sooner in one process
    states, rewards = job.batch()
    optimizer_a.zero_grad()
    optimizer_c.zero_grad()
    policy = torch.distributions.Categorical(logits=ddp_a(states))
    values = ddp_c(states)
    actions = policy.probs.argmax(1)
    advantage = (rewards - values).squeeze(1)
    loss_c = advantage.square().mean()
    loss_a = -(policy.log_prob(actions) * advantage.detach()).mean() - 0.01 * policy.entropy().mean()
    loss_c.backward()
    loss_a.backward()
    with job.committing() as committed:
        if committed:
            adam_a.step()
            adam_c.step()
    job.record(loss_c)
job.finish()
