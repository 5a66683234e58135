"""`specdec watch`: a page that follows a running service."""
