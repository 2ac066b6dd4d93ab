"""One training step on nothing: tensors without memory, as one rank of a world that does not exist."""
