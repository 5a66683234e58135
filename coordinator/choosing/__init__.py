"""Choosing how each round drafts: which drafter, and how many draft tokens."""
