"""Files of tokens, and the keys of issuers: what is refused, what is kept, and what is asked for again."""

import asyncio
import json
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from specdec.errors import UnauthenticatedError, UnavailableError
from specdec.security_flags import print_new_token
from specdec.serving.security import key_set
from specdec.serving.security.bearer import StaticTokens, read_tokens
from specdec.serving.security.json_web_tokens import JsonWebTokens
from specdec.serving.security.key_set import UrlKeySet, parse_keys
from specdec.serving.settings import JwtSettings
from specdec.watched import WatchedError
from tests.support.secure_cluster import hash_of, replace, write_tokens

GOOD = hash_of("token")
BAD_FILES = {
    "not TOML": ("tokens = [", "is not TOML"),
    "no tenant": ('tokens = ["x"]', "the tenant tokens needs exactly one entry"),
    "another entry": (f'[a]\ntokens = ["{GOOD}"]\nname = "x"', "the tenant a needs exactly one entry"),
    "a name of other letters": (f'["a b"]\ntokens = ["{GOOD}"]', "a tenant whose name is not one"),
    "a token itself": ('[a]\ntokens = ["canary-token"]', "token 1 of a is not `sha256:`.*`specdec token` prints it"),
    "a number": ("[a]\ntokens = [7]", "token 1 of a has to be a hash"),
    "no hash": ("[a]\ntokens = [{ expires = 2027-01-01T00:00:00Z }]", "token 1 of a is not `sha256:`"),
    "a local time": (f'[a]\ntokens = [{{ hash = "{GOOD}", expires = 2027-01-01 }}]', "with its zone"),
    "one token for two": (f'[a]\ntokens = ["{GOOD}"]\n[b]\ntokens = ["{GOOD}"]', "b and a have the same token"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_malformed_files_are_explained(name: str, tmp_path: Path) -> None:
    """Without any value: it may be a token."""
    text, words = BAD_FILES[name]
    file = tmp_path / "tokens.toml"
    file.write_text(text)
    with pytest.raises(WatchedError, match=words) as caught:
        read_tokens(file)
    assert "canary" not in str(caught.value)


def test_a_malformed_replacement_is_left_out(tmp_path: Path) -> None:
    file = write_tokens(tmp_path / "tokens.toml", {"acme": ["one", "two"]})
    tokens = StaticTokens(file, period_s=0.0)
    replace(file, "nonsense")
    assert tokens.credential("one").tenant == tokens.credential("two").tenant == "acme"
    write_tokens(file, {"acme": ["two"]})
    with pytest.raises(UnauthenticatedError, match="withdrawn"):
        tokens.credential("one")
    assert tokens.credential("two").tenant == "acme"


def test_the_command_makes_tokens(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    print_new_token(None)  # type: ignore[arg-type]
    token, digest = (line.split()[1] for line in capsys.readouterr().out.splitlines())
    assert hash_of(token) == digest
    assert len(token) >= 43, "256 bits"


def public_keys(*entries: tuple[str, ec.EllipticCurvePrivateKey]) -> bytes:
    keys = [json.loads(jwt.algorithms.ECAlgorithm.to_jwk(key.public_key())) | {"kid": name} for name, key in entries]
    return json.dumps({"keys": keys}).encode()


def test_keys_that_anybody_could_sign_with_are_left_out() -> None:
    """A shared secret in a key set, as an attacker's way to a token that is signed with a public key."""
    private = ec.generate_private_key(ec.SECP256R1())
    shared = {"kty": "oct", "kid": "shared", "k": "c2VjcmV0"}
    unknown = {"kty": "EC", "crv": "P-unheard-of", "kid": "new"}
    encrypting = json.loads(public_keys(("e", private)))["keys"][0] | {"use": "enc"}
    signing = json.loads(public_keys(("s", private)))["keys"][0]
    content = json.dumps({"keys": [shared, unknown, encrypting, signing]}).encode()
    assert list(parse_keys(content, "keys")) == ["s"]
    for nothing in (b"", b"[]", b'{"keys": 7}', b'{"keys": [7]}', json.dumps({"keys": [shared]}).encode()):
        with pytest.raises(WatchedError, match="has no usable public keys"):
            parse_keys(nothing, "keys")


class Published:
    """A URL with keys."""

    def __init__(self, content: bytes) -> None:
        self.content: bytes | None = content
        self.num_asked = 0

    def __call__(self, url: str) -> bytes:
        self.num_asked += 1
        if self.content is None:
            raise OSError("no route to host")
        return self.content


class Clock:
    """A clock that a test moves."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


async def test_keys_of_a_url_are_kept() -> None:
    """One request for many tokens at once, and none for unknown keys more often than MIN_REFRESH_S."""
    one, two = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    published = Published(public_keys(("one", one)))
    clock = Clock()
    keys = UrlKeySet("https://issuer.example/keys", published, clock)
    await asyncio.gather(*(keys.find("one") for _ in range(50)))
    assert published.num_asked == 1
    published.content = public_keys(("one", one), ("two", two))
    for _ in range(20):
        with pytest.raises(UnauthenticatedError, match="does not publish"):
            await keys.find("two")
    assert published.num_asked == 1
    clock.now_s += key_set.MIN_REFRESH_S
    await keys.find("two")
    assert published.num_asked == 2


async def test_keys_outlive_their_issuers_absence() -> None:
    published = Published(public_keys(("one", ec.generate_private_key(ec.SECP256R1()))))
    clock = Clock()
    keys = UrlKeySet("https://issuer.example/keys", published, clock)
    await keys.find("one")
    published.content = None
    clock.now_s += 2 * key_set.REFRESH_S
    assert (await keys.find("one")).key_id == "one"
    absent = UrlKeySet("https://issuer.example/keys", published)
    with pytest.raises(UnavailableError, match="keys cannot be fetched; try again"):
        await absent.find("one")


async def test_a_public_key_is_no_shared_secret() -> None:
    """The oldest attack: a token signed by HMAC with the published key's bytes as the secret."""
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    public = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(private.public_key())) | {"kid": "one"}
    published = Published(json.dumps({"keys": [public]}).encode())
    settings = JwtSettings("https://issuer.example", "specdec", "", "sub")
    tokens = JsonWebTokens(settings, UrlKeySet("https://issuer.example/keys", published))
    claims = {"iss": settings.issuer, "aud": "specdec", "sub": "acme", "exp": 4e9}
    assert (
        await tokens.credential(jwt.encode(claims, private, algorithm="RS256", headers={"kid": "one"}))
    ).tenant == "acme"
    forged = jwt.encode(claims, public["n"], algorithm="HS256", headers={"kid": "one"})
    with pytest.raises(UnauthenticatedError, match="is not valid"):
        await tokens.credential(forged)
