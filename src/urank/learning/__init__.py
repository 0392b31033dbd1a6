"""Networks, batches, training and LightGBM data: what every learned model shares."""
