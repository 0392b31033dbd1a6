"""A/B tests from an exposure log: who sees what, what it earned, how sure that is, and how long a test must run."""
