"""``GET /ui``: one HTML file without anything from elsewhere, and the headers that hold it to that."""

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib import resources

PATH = "/ui"


@dataclass(frozen=True, slots=True)
class Page:
    """The page and its headers."""

    html: str
    headers: dict[str, str]


def load() -> Page:
    """Return the packaged page; its policy admits the script and the style by their hashes and no others."""
    html = resources.files("moesaic.server").joinpath("ui.html").read_text(encoding="utf-8")
    return Page(
        html,
        {
            "Content-Security-Policy": _policy(_inline(html, "script"), _inline(html, "style")),
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache",
        },
    )


def _policy(script: str, style: str) -> str:
    rules = {
        "default-src": "'none'",
        "script-src": _hash(script),
        "style-src": _hash(style),
        "img-src": "data:",  # an empty icon, so that browsers ask for none
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in rules.items())


def _inline(html: str, tag: str) -> str:
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    return str(text)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
