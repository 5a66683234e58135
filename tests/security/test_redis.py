"""Redis over TLS, with a user, a password and no more rights than the scripts need."""

from pathlib import Path

import pytest

from coordinator.prompts import EncodedPrompt
from coordinator.session_ids import SECRET_BYTES
from coordinator.sessions import open_store
from specdec.errors import UnavailableError
from specdec.exact.prefix import chain
from tests.support.certificates import Authority
from tests.support.secure_redis import secure_redis, secure_sentinel

PASSWORD = "canary-password"
PROMPT = EncodedPrompt((1, 2), chain(b"", (1, 2)))


async def test_sessions_over_tls_with_a_password(tmp_path: Path) -> None:
    """In the URL, or in a file; all coordinators get the same secret."""
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    secrets = set()
    with secure_redis(Authority().files(tmp_path, "redis"), PASSWORD) as redis:
        for store in (open_store(redis.url(PASSWORD), 60), open_store(redis.url(), 60, file)):
            await store.ping()
            await store.create("a", b"f", b"", PROMPT)
            assert (await store.claim("a")).prompt == PROMPT.tokens
            secrets.add(await store.secret())
            await store.close()
    assert [len(secret) for secret in secrets] == [SECRET_BYTES]


async def test_sentinels_over_tls_with_a_password_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    with (
        secure_redis(Authority().files(tmp_path, "redis"), PASSWORD) as redis,
        secure_sentinel(redis, "main", "sentinels/own") as port,
    ):
        where = f"127.0.0.1:{port}/main/0?ssl_ca_certs={redis.files.ca}"
        login = "sentinel_password=sentinels%2Fown"
        for store in (
            open_store(f"rediss+sentinel://specdec:{PASSWORD}@{where}&{login}", 60),
            open_store(f"rediss+sentinel://specdec@{where}&{login}", 60, file),
        ):
            assert len(await store.secret()) == SECRET_BYTES
            assert await store.ping()
            await store.close()
        store = open_store(f"rediss+sentinel://specdec@{where}&sentinel_password=wrong", 60, file, patience_s=0.5)
        with pytest.raises(UnavailableError, match=r"has no master .none of 1 Sentinels names a master of main"):
            await store.secret()
        await store.close()


async def test_wrong_logins_are_refused_without_the_password(tmp_path: Path) -> None:
    with secure_redis(Authority().files(tmp_path, "redis"), "right") as redis:
        plain = redis.url(PASSWORD).replace("rediss", "redis").partition("?")[0]
        stranger = Authority().files(tmp_path / "stranger", "x")
        distrusting = redis.url("right").replace(str(redis.files.ca), str(stranger.ca))
        for url in (redis.url(PASSWORD), plain, distrusting):
            store = open_store(url, 60, patience_s=2.0)
            with pytest.raises(UnavailableError) as caught:
                await store.ping()
            assert PASSWORD not in str(caught.value)
            await store.close()


async def test_an_evicting_policy_is_refused(tmp_path: Path) -> None:
    with secure_redis(Authority().files(tmp_path, "redis"), "p", "maxmemory-policy volatile-lru") as redis:
        store = open_store(redis.url("p"), 60)
        with pytest.raises(ValueError, match=r"maxmemory-policy volatile-lru\); set maxmemory-policy noeviction"):
            await store.ping()
        await store.close()


def test_two_passwords_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="give one of them") as caught:
        open_store(f"rediss://u:{PASSWORD}@h/0", 60, tmp_path / "file")
    assert PASSWORD not in str(caught.value)
    with pytest.raises(ValueError, match=r"--store-password-file .*missing cannot be read \(No such file"):
        open_store("rediss://u@h/0", 60, tmp_path / "missing")


@pytest.mark.parametrize(
    "url", [f"redis://:{PASSWORD}/x@h:1/0", f"nodis://:{PASSWORD}@h", f"rediss://u:{PASSWORD}@h:x/0"]
)
def test_malformed_urls_are_not_quoted(url: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # any sentence, but for the password
        open_store(url, 60)
    assert PASSWORD not in str(caught.value)
