"""Examination propensities: how likely an item is examined at each position, for weighting clicks."""
