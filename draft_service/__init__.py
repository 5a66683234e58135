"""The draft workers: cheap guesses at what the target will say, each with the row that it was drawn from."""
