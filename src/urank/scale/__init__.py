"""The same preparing, training, evaluating and ranking on the workers of a Ray cluster."""
