"""Drafting with heads: rounds of sessions, their keys and values, and what runs a head for several at once."""
