"""The Redis that keeps sessions: one server, the master that Sentinels name, a cluster, or one of our own.

    address -> route (which server has a key's master now) -> node (one server's connections) -> client (retries, WAIT)

Every attempt of a call asks its route again, so a failover is followed by the next attempt. The calls are Lua scripts
that recognise their own replay, so a call whose reply was lost may be repeated.
"""
