"""The leaves of a state: numbers and objects, plain tensors, shards, and tensors of other libraries."""
