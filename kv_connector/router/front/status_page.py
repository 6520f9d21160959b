"""Page: the status page, one file that loads nothing but the router's own /status.json."""

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Self


@dataclass(frozen=True)
class Page:
    html: str
    headers: Mapping[str, str]

    @classmethod
    def load(cls) -> Self:
        html = resources.files(__package__).joinpath("status_page.html").read_text("utf-8")
        # The page shows an engine's messages as text. If that failed one day, a browser would still run
        # nothing.
        policy = (
            "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
            f"frame-ancestors 'none'; script-src {_hashes('script', html)}; "
            f"style-src {_hashes('style', html)}"
        )
        headers = {
            "content-security-policy": policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        return cls(html, headers)


def _hashes(tag: str, html: str) -> str:
    """Returns CSP sources with which a browser accepts the page's own elements of this kind, and no
    others."""
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
    return " ".join(f"'sha256-{digest}'" for digest in digests)
