"""Addresses of stores: their parts, what is refused, and that no sentence quotes a password."""

import pytest

from specdec.serving.store_url import StoreUrl

PASSWORD = "canary-password"


def test_sentinels_and_their_service() -> None:
    url = StoreUrl.parse("redis+sentinel://me:p%40w@one:1,two,[::1]:3/main/2?client_name=x&sentinel_password=s%2Fw")
    assert (url.kind, url.service, url.places) == ("sentinel", "main", (("one", 1), ("two", 26379), ("::1", 3)))
    assert url.node(("ten", 10)) == "redis://me:p%40w@ten:10/2?client_name=x"
    assert url.node(("::2", 10), login=False) == "redis://[::2]:10/2?client_name=x"
    assert url.sentinel(url.places[1]) == "redis://:s%2Fw@two:26379"
    assert (url.username, url.has_password, url.shown) == ("me", True, "one:1, two:26379, ::1:3")


def test_tls_is_for_every_connection() -> None:
    url = StoreUrl.parse("rediss+sentinel://s/main?ssl_ca_certs=/ca.pem&sentinel_username=u&sentinel_password=w&db=3")
    assert url.node() == "rediss://s:26379/?ssl_ca_certs=%2Fca.pem&db=3"
    assert url.sentinel(url.places[0]) == "rediss://u:w@s:26379?ssl_ca_certs=%2Fca.pem"


def test_nodes_of_a_cluster() -> None:
    url = StoreUrl.parse("rediss+cluster://me@one,two:7000/0")
    assert (url.kind, url.places, url.username) == ("cluster", (("one", 6379), ("two", 7000)), "me")
    assert url.node(("three", 1)) == "rediss://me@three:1/0"


@pytest.mark.parametrize(
    "address", ["redis://me:pw@h:7/3?client_name=x", "unix:///run/redis.sock?db=2", "rediss://h:1/"]
)
def test_one_redis_is_as_it_was_written(address: str) -> None:
    assert StoreUrl.parse(address).node() == address


@pytest.mark.parametrize(
    ("address", "is_exposed"),
    [
        ("redis://127.0.0.1", False),
        ("redis://elsewhere", True),
        ("rediss://elsewhere", False),
        ("unix:///run/redis.sock", False),
        ("redis+sentinel://localhost,elsewhere/main", True),
        ("redis+cluster://127.0.0.1,[::1]", False),
        ("rediss+cluster://elsewhere", False),
    ],
)
def test_plain_text_to_other_machines_is_seen(address: str, is_exposed: bool) -> None:
    assert StoreUrl.parse(address).is_exposed is is_exposed


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("nonsense", "--store is 'nonsense'; give embedded, redis://"),
        (f"mysql://me:{PASSWORD}@h", "--store is 'mysql://...'; give embedded"),
        ("redis+sentry://h/main", "--store is 'redis.sentry://h/main'; give embedded"),
        (f"redis+sentinel://me:{PASSWORD}@h", "names no service; give redis.sentinel://HOST:26379/SERVICE/0"),
        (f"redis+sentinel://me:{PASSWORD}@h/main/x", "names a database that is no number"),
        (f"redis+cluster://me:{PASSWORD}@h/1", "a Redis Cluster has only 0"),
        (f"redis://me:{PASSWORD}@h,i/0", "names several hosts; give redis.sentinel://... or redis.cluster://"),
        (f"redis://me:{PASSWORD}/x@h/0", "write / as %2F"),
        (f"redis://me:{PASSWORD}?x@h/0", "write / as %2F"),
        (f"redis+cluster://me:{PASSWORD}:x@h:port", "wrong host or port"),
        ("redis://h:70000", "wrong host or port"),
    ],
)
def test_wrong_addresses_are_refused_without_the_password(address: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        StoreUrl.parse(address)
    assert PASSWORD not in str(caught.value)
