"""Rankers, the policies made of them, and the utility that they maximise."""
