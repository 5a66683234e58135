"""Drafting with heads: sessions, their keys and values, and one thread that runs a head for all of them."""
