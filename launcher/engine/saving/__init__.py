"""The partitioned state in files: checkpoints, written at once or in the background, weights to begin with, exports."""
