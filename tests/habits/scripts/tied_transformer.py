"""A small transformer with tied embeddings, an untrained mask buffer, and dropout with a seed for each step."""

import torch
from habit import start
from torch import nn


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(10), persistent=False)

    def forward(self, tokens):
        return self.head(self.block(self.embed(tokens), self.mask, is_causal=True))


job = start(plain={"": "dropout draws other numbers for half of a batch"})
model = Language()
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

while job.current_step() < 10:
    step = job.current_step()
    tokens = job.share(torch.randint(30, (8, 11), generator=torch.Generator().manual_seed(step)))
    torch.manual_seed(10 * step + job.group)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
