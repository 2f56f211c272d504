"""Who may use the servers of `headrace up`: on loopback everybody on this machine, elsewhere who has the login."""

import os
from ipaddress import ip_address

from headrace.errors import ConfigError

LOGIN_VARIABLE = "PREFECT_SERVER_API_AUTH_STRING"
MIN_PASSWORD_LENGTH = 12
KNOWN_PASSWORDS = ("changeme", "letmein", "mlflow", "pass", "prefect", "qwerty", "secret", "admin", "1234")
"""A password that is one of these, or little more, is none: the first ones that everybody tries."""


def require_safe_host(host: str) -> None:
    """Refuse to let others in without a login, and an address that no browser can ask."""
    if host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"--host {host} is no address that a browser can open. Give the one by which others reach this machine."
        )
    if _is_loopback(host):
        return
    login = os.environ.get(LOGIN_VARIABLE)
    if not login:
        raise ConfigError(
            f"--host {host} lets other machines start runs here without a login. Set {LOGIN_VARIABLE} to "
            "NAME:PASSWORD, or leave --host at 127.0.0.1 and use an SSH tunnel."
        )
    fault = _fault(login)
    if fault:
        # The login is not repeated: what is said here is logged.
        raise ConfigError(
            f"--host {host} lets other machines start runs here, but the login in {LOGIN_VARIABLE} {fault}. Set it to "
            f"NAME:PASSWORD with a password of your own of {MIN_PASSWORD_LENGTH} characters or more."
        )


def _fault(login: str) -> str | None:
    name, colon, password = login.partition(":")
    if not (name and colon and password):
        return "is not of the form NAME:PASSWORD"
    if len(password) < MIN_PASSWORD_LENGTH:
        return f"has a password of {len(password)} characters"
    rest = password.lower()
    for known in (*KNOWN_PASSWORDS, name.lower(), "word"):
        rest = rest.replace(known, "")
    if len(rest) < MIN_PASSWORD_LENGTH // 2:
        return "has a password that everybody tries first"
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
