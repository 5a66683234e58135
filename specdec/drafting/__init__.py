"""Drafting without a model, for the workers that do it: what may follow a token, and trees of that."""
