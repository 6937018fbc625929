"""The shard of this rank: model, optimizer, and what a step that is dropped or repeated needs of them."""
