"""Proposers: each takes the history of trials and says which config to probe next."""
