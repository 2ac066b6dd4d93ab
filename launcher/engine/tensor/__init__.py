"""Tensor parallelism: layers over plain local tensors, a map of names to them, and the reference GPT of them."""
