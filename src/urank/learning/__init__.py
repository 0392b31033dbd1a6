"""Shared parts of all learned models: features, networks, batches, the training loop, and LightGBM data."""
