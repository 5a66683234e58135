"""The coordinator: drafts, scores, accepts, commits and streams. It imports no torch."""
