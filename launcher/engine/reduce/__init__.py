"""A step's second phase, gradients: through buckets to the ranks that own them, their norm, and whose is not finite."""
