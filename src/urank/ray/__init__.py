"""Prepare, train, evaluate and rank on a Ray cluster."""
