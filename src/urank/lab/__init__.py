"""The laboratory: simulation and the experiments of the paper. It proves the product and is no part of it."""
