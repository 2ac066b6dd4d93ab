"""A step's third phase: the optimizers on flat shards."""
