"""Training of a model that exists only once: members hold shards, and other members keep copies of them."""
