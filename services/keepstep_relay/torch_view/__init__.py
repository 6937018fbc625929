"""A stored checkpoint as the files of torch.distributed.checkpoint. Needs no torch."""
