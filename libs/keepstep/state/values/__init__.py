"""The leaves of a state: numbers, objects, plain tensors, shards, tensors of other libraries, state of optimizers."""
