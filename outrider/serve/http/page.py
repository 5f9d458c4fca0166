"""The live page at /: one file, and a Content-Security-Policy that allows only the script and style in it."""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from functools import cache
from pathlib import Path

POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)


@cache
def page() -> tuple[str, str]:
    """The page, and its policy: the hashes of its script and style, and requests to its own server."""
    html = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return html, POLICY.format(scripts=_hashes(html, "script"), styles=_hashes(html, "style"))


def _hashes(html: str, tag: str) -> str:
    texts = re.findall(rf"<{tag}>(.*?)</{tag}>", html, flags=re.DOTALL)
    assert texts, f"page.html has no <{tag}>"
    return " ".join(f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts)
