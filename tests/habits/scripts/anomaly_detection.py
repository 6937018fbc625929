"""detect_anomaly around the step, an evaluation in inference_mode with the wrapped model, and copies of the model."""

import copy
import io
import pickle

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.0), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

while job.current_step() < 10:
    x, y = job.batch()
    with torch.autograd.set_detect_anomaly(True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
    job.record(loss)
    ddp.eval()
    with torch.inference_mode():
        ddp(x)
    ddp.train()
    twin = copy.deepcopy(ddp.module)
    assert torch.equal(twin(x), pickle.loads(pickle.dumps(ddp.module))(x))
    torch.save(ddp.module, io.BytesIO())
job.finish()
