"""Training heads that draft from a target's hidden states, on the target's own answers."""
