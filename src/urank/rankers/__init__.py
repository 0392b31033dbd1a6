"""Rankers: what gives each item a score, and the policies that make an order of scores or of a click table."""
