"""Drafting with heads: their settings, and one thread that runs a head for all sessions."""
