"""A GAN: a discriminator and a generator with an optimizer each, which take turns by the number of the step."""

import torch
from habit import RUN, start
from torch import nn

job = start(**({"use_async_quorum": False} if RUN == "keepstep" else {}))
generator = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8))
discriminator = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
adam_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
adam_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
job.state = {"generator": generator, "discriminator": discriminator, "adam_g": adam_g, "adam_d": adam_d}
ddp_g, ddp_d = job.ddp(generator), job.ddp(discriminator)
optimizer_g, optimizer_d = job.optimizer(adam_g), job.optimizer(adam_d)
bce = nn.functional.binary_cross_entropy_with_logits

while job.current_step() < 10:
    job.start_quorum()
    step = job.current_step()
    real, _ = job.batch()
    noise = job.share(torch.randn(16, 4, generator=torch.Generator().manual_seed(step)))
    if step % 2 == 0:
        optimizer_d.zero_grad()
        fake = generator(noise).detach()
        loss = bce(ddp_d(real), torch.ones(len(real), 1)) + bce(ddp_d(fake), torch.zeros(len(real), 1))
        loss.backward()
        optimizer_d.step()
    else:
        optimizer_g.zero_grad()
        loss = bce(discriminator(ddp_g(noise)), torch.ones(len(real), 1))
        loss.backward()
        optimizer_g.step()
    job.record(loss)
job.finish()
