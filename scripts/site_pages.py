"""What the site adds to docs/: pages of methods and of results, and repository links in docs/ rewritten for the site.

Called by mkdocs through site_hooks.py; imports neither mkdocs nor torch.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path, PurePosixPath

from scripts import site_methods

ROOT = Path(__file__).resolve().parent.parent
DOCS, RESULTS = "docs", "benchmarks/pages"
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
INCLUDE = re.compile(r"^<!-- include (\S+) -->$", re.MULTILINE)
COMMENT = re.compile(r"^<!--.*?-->$", re.MULTILINE)
FOLDERS = ("methods/", "results/")
"""Nav entries that expand to all pages below them."""


def generated() -> dict[str, str]:
    """Pages without a file in docs/, by their path in the site: Markdown with unresolved links."""
    return site_methods.pages() | {place: (ROOT / source).read_text("utf-8") for place, source in results().items()}


@cache
def results() -> dict[str, str]:
    """Site paths of the result pages, and the files they come from."""
    pages = sorted((ROOT / RESULTS).glob("*.md"))
    return {"results/index.md": "benchmarks/RESULTS.md"} | {
        f"results/{path.name}": f"{RESULTS}/{path.name}" for path in pages
    }


@cache
def places() -> dict[str, str]:
    """The site path of a file of the repository."""
    docs = {f"{DOCS}/{path.name}": path.name for path in (ROOT / DOCS).glob("*.md")}
    return docs | {source: place for place, source in results().items()}


def looks() -> str:
    """A style sheet that gives charts the page's colour scheme: light and dark colours, and no background."""
    drawing = next((ROOT / "benchmarks" / "charts").glob("*.svg")).read_text("utf-8")
    light, dark = re.findall(r"\.drawing \{(--paper[^}]*)\}", drawing)
    return (
        f'[data-md-color-scheme="default"] .drawing {{{light}}}\n[data-md-color-scheme="slate"] .drawing {{{dark}}}\n'
        ".drawing .ground { fill: none !important; }\n.drawing { --paper: var(--md-default-bg-color) !important; }\n"
    )


def expanded(nav: list[object]) -> list[object]:
    """The nav with every page of a folder in place of `methods/` and `results/`."""
    inside = sorted([*results(), "methods/index.md", *(f"methods/{kind}.md" for kind in site_methods.kinds())])
    inside.sort(key=lambda place: (place.split("/")[0], not place.endswith("/index.md"), place))
    found: list[object] = []
    for entry in nav:
        if isinstance(entry, dict):
            found += [{name: expanded(one) if isinstance(one, list) else one} for name, one in entry.items()]
        elif entry in FOLDERS:
            found += [place for place in inside if place.startswith(str(entry))]
        else:
            found.append(entry)
    return found


def rendered(markdown: str, place: str) -> str:
    """A page as the site shows it.  place: its path in the site."""
    source = results().get(place, f"{DOCS}/{place}")

    def prose(text: str) -> str:
        text = LINK.sub(lambda link: linked(link, source, place), text)
        if place == "drafters.md":
            kinds = "|".join(site_methods.kinds())
            text = re.sub(rf"^\| `({kinds})` \|", r"| [`\1`](methods/\1.md) |", text, flags=re.MULTILINE)
        text = INCLUDE.sub(lambda found: included(source, found[1]), text)
        return COMMENT.sub("", text)

    return outside_code(markdown, prose)


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """The page with `change` applied outside code blocks."""
    parts, at = [], 0
    for block in FENCE.finditer(markdown):
        parts += [change(markdown[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, change(markdown[at:])])


def linked(link: re.Match[str], source: str, place: str) -> str:
    """A link between repository files as a link between pages; a link to something not on the site becomes the file's
    name."""
    mark, text, to, anchor = link[1], link[2], link[3], link[4] or ""
    if "://" in to or place.startswith("methods/"):  # these are already written for the site
        return link[0]
    file = os.path.normpath(PurePosixPath(source).parent / to)
    if mark and file.endswith(".svg"):
        return chart(ROOT / file, text)
    if mark and file.endswith(".png"):
        return image(ROOT / file, text)
    if file not in places():
        if not (ROOT / file).exists():
            raise ValueError(f"{source} links to {to}, which is not there")
        return f"`{file}`" if text == os.path.basename(file) else f"{text} (`{file}`)"
    shown = title(file) if text == os.path.basename(file) and not anchor else text
    return f"{mark}[{shown}]({os.path.relpath(places()[file], os.path.dirname(place) or '.')}{anchor})"


@cache
def title(file: str) -> str:
    """The title of a page; in the repository it is known by its file name."""
    return (ROOT / file).read_text("utf-8").partition("\n")[0].removeprefix("# ")


def chart(file: Path, text: str) -> str:
    """A chart inlined into the page, so that it takes the page's colours."""
    drawing = file.read_text("utf-8").strip()
    return f'<figure class="chart" markdown="0">\n{drawing}\n<figcaption>{text}</figcaption></figure>\n'


def image(file: Path, text: str) -> str:
    """An image within the page, since the site has no files besides its pages."""
    return f'<img alt="{text}" src="data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}">'


def included(source: str, what: str) -> str:
    """A file as a code block, or with `FILE:NAME` one of its functions or classes, with `FILE:first` and `FILE:last`
    the lines before the first and after the last of them."""
    file, _, name = what.partition(":")
    path = ROOT / os.path.normpath(PurePosixPath(source).parent / file)
    lines = path.read_text("utf-8").splitlines()
    heads = [at for at, line in enumerate(lines) if re.match(r"(class|def) ", line)]
    ends = [
        next((at for at in range(head + 1, len(lines)) if re.match(r"\S", lines[at])), len(lines)) for head in heads
    ]
    spans = {re.split(r"\W", lines[head])[1]: (head, end) for head, end in zip(heads, ends, strict=True)}
    spans |= {"": (0, len(lines))}
    if heads:
        spans |= {"first": (0, heads[0]), "last": (ends[-1], len(lines))}
    if name not in spans:
        raise ValueError(f"{source} includes {what}, but {file} has {', '.join(filter(None, spans))}")
    start, end = spans[name]
    return "```python\n" + "\n".join(lines[start:end]).strip("\n") + "\n```"
