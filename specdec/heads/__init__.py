"""Heads: small networks that draft from the target's hidden states, in the formats in which they are published."""
