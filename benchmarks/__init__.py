"""Speed and memory, measured as ratios against a peer or a limit in the same run: `python -m benchmarks NAME`."""
