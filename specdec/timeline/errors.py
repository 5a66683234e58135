"""How it is said that there will be no trace."""


class TraceError(Exception):
    """No trace can be made. The message is for the user."""
