"""mkdocs hooks: pages that are generated while the site is built, and links to them (see site_pages.py)."""

from __future__ import annotations

import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts import site_pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = site_pages.expanded(config.nav or [])
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for place, text in site_pages.generated().items():
        files.append(File.generated(config, place, content=text))
    files.append(File.generated(config, "charts.css", content=site_pages.looks()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return site_pages.rendered(markdown, page.file.src_uri)
