"""What pip needs inside a build to reach the packages that this machine's pip reaches.

pip's own settings become a pip.conf and a CA bundle, which a build gets as secrets: no layer keeps them, so an index's
password stays here. An index or wheels in folders of this machine are mounted at the same place.
"""

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from deploy.image_check.processes import read

REACHING = ("index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "proxy")
PATIENCE = ("timeout", "default-timeout", "retries")
CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE")  # in pip's order of precedence
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
CA_SECRET = "/run/secrets/ca"


def machine_settings() -> dict[str, str]:
    """Return the settings of this interpreter's pip by their long names; empty without pip."""
    return parse(read([sys.executable, "-m", "pip", "config", "list"]) or "")


def parse(listed: str) -> dict[str, str]:
    """Return settings from `pip config list`: a variable wins over `[install]`, and that over `[global]`."""
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        sections.get(section, {})[key] = str(ast.literal_eval(value))
    return sections["global"] | sections["install"] | sections[":env:"]


def build_arguments(settings: Mapping[str, str], environment: Mapping[str, str], folder: Path) -> list[str]:
    """Return the secrets and proxies for a build; their files are written into `folder`."""
    kept = {name: value for name, value in settings.items() if name in (*REACHING, *PATIENCE)}
    bundle = settings.get("cert") or next((environment[name] for name in CA_VARIABLES if environment.get(name)), None)
    if bundle:
        kept["cert"] = CA_SECRET
    configuration = folder / "pip.conf"
    configuration.write_text("\n".join(["[global]", *(f"{name} = {_indented(kept[name])}" for name in kept)]) + "\n")
    secrets = ["--secret", f"id=pip,src={configuration}", *(["--secret", f"id=ca,src={bundle}"] if bundle else [])]
    proxies = [word for name in PROXY_VARIABLES if name in environment for word in ("--build-arg", name)]
    return [*secrets, *proxies]


def _indented(value: str) -> str:
    """A setting of several lines goes on where a line starts with space."""
    return "\n    ".join(value.split())


def local_folders(settings: Mapping[str, str]) -> list[Path]:
    """Return the folders of this machine that pip reads. An index's files may lie beside it, so its parent is taken."""
    indexes = [path.parent for name in ("index-url", "extra-index-url") for path in _paths(settings.get(name, ""))]
    links = list(_paths(settings.get("find-links", "")))
    return sorted({path for path in (*indexes, *links) if path.is_dir() and path != Path("/")})


def _paths(value: str) -> Iterator[Path]:
    for word in value.split():
        if word.startswith(("file:", "/")):
            yield Path(unquote(urlsplit(word).path))


def volumes(folders: Iterable[Path]) -> list[str]:
    """Return the arguments that mount folders at the same path, read-only."""
    return [word for folder in folders for word in ("--volume", f"{folder}:{folder}:ro")]


def of_this_machine(folder: Path) -> tuple[list[str], list[Path]]:
    """Return a build's arguments for this machine's pip, and the folders that it must see."""
    settings = machine_settings()
    return build_arguments(settings, os.environ, folder), local_folders(settings)
