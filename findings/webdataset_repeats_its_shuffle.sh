#!/usr/bin/env bash
# Guess: WebDataset with shardshuffle=100 has the shards in another order in each epoch.
# Seen: it has one order for all epochs: it draws a seed when it is made, and each epoch starts a generator from that
#   seed. With detshuffle=True the number of the epoch is added, but each worker counts in its own copy of the dataset:
#   with DataLoader workers each epoch is the first one again, unless the workers are persistent.
# Version: webdataset 1.0.2 with torch 2.13.0.
# Why it matters: a shuffle of samples after it mixes only those that are near, so each epoch brings the data in nearly
#   the same order, and the samples of one shard never meet those of a distant one in a batch. Nothing reports it: each
#   epoch is complete, and a new start of the job has another order.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 webdataset==1.0.2
program <<'PYTHON'
import webdataset
from finding import compare, show_versions

show_versions("webdataset", "torch")
for shard in range(40):
    with webdataset.TarWriter(f"{shard}.tar") as writer:
        writer.write({"__key__": str(shard), "txt": str(shard)})


def orders(workers=0, persistent=False, deterministic=False):
    """Return the number of different orders in three epochs."""
    data = webdataset.WebDataset("{0..39}.tar", shardshuffle=100, detshuffle=deterministic).decode().to_tuple("txt")
    loader = webdataset.WebLoader(data, batch_size=None, num_workers=workers, persistent_workers=persistent)
    return len({tuple(text for (text,) in loader) for _ in range(3)})


for words, arguments, known in (
    ("shardshuffle=100", {}, 1),
    ("shardshuffle=100, detshuffle=True", {"deterministic": True}, 3),
    ("the same with two workers", {"deterministic": True, "workers": 2}, 1),
    ("the same with two persistent workers", {"deterministic": True, "workers": 2, "persistent": True}, 3),
):
    compare(f"different orders of 40 shards in three epochs; {words}", guess=3, seen=orders(**arguments), known=known)
PYTHON
