"""Offline evaluation: estimate what policies would earn from a log that another policy wrote."""
