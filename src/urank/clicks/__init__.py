"""Click models: each gives, for every item, the log of its click probability at every position, `[rows, K]`."""
