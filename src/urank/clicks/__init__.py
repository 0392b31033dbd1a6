"""Click models: log P(click) of every item at every position, `log_ctr[rows, K]`."""
