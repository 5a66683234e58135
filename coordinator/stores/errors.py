"""What an attempt's failure means: repeat it, here or elsewhere, or give up."""

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

# replies of a server that is not, or not yet, the master that it was, or that misses its replicas
PASSING = (ReadOnlyError, MasterDownError, ClusterDownError, TryAgainError, NoScriptError)
# the same in the midst of a script's error, as servers before version 7 quote them, and those that redis-py leaves as
# they are
PASSING_WORDS = ("READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "UNBLOCKED")


class TooFewReplicas(RedisError):
    """The call was executed, but not enough replicas have it yet."""


class NoMaster(RedisConnectionError):
    """Nobody knows a master."""


def is_refusal(error: RedisError) -> bool:
    """Return whether the server has understood and refuses for good: repeating does not help."""
    if isinstance(error, AuthenticationError | AuthorizationError):
        return True
    return isinstance(error, ResponseError) and not is_passing(error)


def is_passing(error: RedisError) -> bool:
    """Return whether an error reply is about the server's state, which may pass."""
    if isinstance(error, AskError):  # MovedError is one too, for redis-py
        return not isinstance(error, MovedError)
    is_quoted = isinstance(error, ResponseError) and any(word in str(error) for word in PASSING_WORDS)
    return isinstance(error, PASSING) or is_quoted


def sentence(error: RedisError) -> str:
    """Return what a caller is told once a call is given up; no error of Redis names a password."""
    if isinstance(error, TooFewReplicas):
        return f"the session store keeps too few copies ({error}); what was shown is safe, try again"
    if isinstance(error, NoMaster):
        return f"the session store has no master ({error}); what was committed is safe, try again"
    if isinstance(error, ReadOnlyError) or "READONLY" in str(error):
        remedy = "give the master, or redis+sentinel://..."
        return f"the session store is a replica, which takes no writes; {remedy}, or try again during a failover"
    if isinstance(error, MovedError):
        return "the session store is part of a cluster that sends us elsewhere; give redis+cluster://..., or try again"
    if is_refusal(error):
        return f"the session store refuses ({error}); see to its address, password and rights"
    return f"the session store does not answer ({type(error).__name__}); what was committed is safe, try again"
