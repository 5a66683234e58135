"""The draft workers: they propose draft tokens, each with the distribution that it was drawn from."""
