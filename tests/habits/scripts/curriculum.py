"""A recurrent net on sequences that become longer, with packed sequences of uneven length."""

import torch
from habit import start
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm, self.out = nn.Embedding(20, 8), nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 2)

    def forward(self, tokens, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.lstm(packed)[1][0][-1])


job = start()
model = Tagger()
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

while job.current_step() < 10:
    longest = 3 + job.current_step()
    random = torch.Generator().manual_seed(job.current_step())
    tokens = job.share(torch.randint(20, (16, longest), generator=random))
    lengths = job.share(torch.randint(1, longest + 1, (16,), generator=random))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(tokens, lengths), tokens[:, 0] % 2)
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
