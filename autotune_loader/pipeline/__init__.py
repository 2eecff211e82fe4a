"""The user's parts of a loader, the one place that builds a DataLoader, and the traces of its batches."""
