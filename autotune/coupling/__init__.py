"""Whether the loss of a task couples the samples of a batch, found by comparing a batch with its own micro batches."""
