"""The site of the docs: one path through all pages, pages of methods from their files."""

import os
import re
from pathlib import Path
from typing import Any

import yaml

from scripts import site_pages

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
WHOLE = {**site_pages.generated(), **{path.name: path.read_text() for path in DOCS.glob("*.md")}}
"""Every page of the site before it is rendered."""


def places(nav: list[Any]) -> list[str]:
    found = []
    for entry in nav:
        inner = list(entry.values()) if isinstance(entry, dict) else []
        found += [place for one in inner for place in places(one if isinstance(one, list) else [one])]
        found += [entry] if isinstance(entry, str) else []
    return found


def test_the_path_names_every_page_once_and_nothing_else() -> None:
    """Catches a page that was written and that no reader finds, and one that is gone."""
    named = places(site_pages.expanded(CONFIG["nav"]))
    assert sorted(named) == sorted(WHOLE)


def test_links_of_the_site_lead_to_its_pages() -> None:
    """Catches a link that is right in the repository and not in the site."""
    for place, text in WHOLE.items():
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", site_pages.FENCE.sub("", site_pages.rendered(text, place))):
            there = os.path.normpath(os.path.join(os.path.dirname(place), link))
            assert "://" in link or there in WHOLE, f"{place} links to {link}"
