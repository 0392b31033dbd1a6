"""The paper's experiments, reproduced: one module for each group of its tables and figures."""
