"""A rank of a job: it meets the others, makes model and batches, and runs the training loop."""
