"""`tune()`: bursts of training before the training."""
