"""The live page in a real browser, on a real server: it shows what is counted, and which tokens were drafted."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from outrider.drafters import ngram
from outrider.serve.http import keys
from outrider.serve.http.page import page as page_and_policy
from outrider.targets.hf.transformers import TransformersTarget
from tests.report.test_browser import FAINT, FLAGS
from tests.serve.running import Running, running

HTML, POLICY = page_and_policy()
MOST = 48
"""Tokens of an answer."""
WAIT_MS = 60_000


def test_the_page_needs_nothing_from_elsewhere(server):
    """Catches a font, a script or a picture that is not there without a network, and text that is read as HTML."""
    assert not re.search(r"(?:src|href)=\"(?!data:)|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", HTML)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", HTML)
    assert not re.search(r"\son\w+=|\sstyle=|localStorage|sessionStorage|cookie", HTML)
    assert "unsafe" not in POLICY and POLICY.startswith("default-src 'none'; script-src 'sha256-")
    assert "connect-src 'self'" in POLICY and "frame-ancestors 'none'" in POLICY
    served = httpx.get(server.url)
    assert (served.text, served.headers["content-security-policy"]) == (HTML, POLICY)


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no browser: chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One window for the whole file, with a profile of its own."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no browser: playwright")
    with playwright.sync_playwright() as play:
        profile = tmp_path_factory.mktemp("profile")
        context = play.chromium.launch_persistent_context(profile, executable_path=CHROMIUM, headless=True, args=FLAGS)
        yield context
        context.close()


@pytest.fixture(scope="module")
def server(talker: TransformersTarget) -> Iterator[Running]:
    """The tiny target, whose texts soon repeat themselves, with n-grams."""
    with running(talker, ngram.build(ngram.Config(), talker), slots=2, length=256) as found:
        yield found


@dataclass
class Opened:
    """The page, open, and what it complained of or asked for meanwhile."""

    page: Any
    faults: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def write(self, prompt: str, *, both: bool = True, most: int = MOST) -> None:
        """Ask for a greedy text, and wait for its end."""
        self.page.fill("#prompt", prompt)
        self.page.fill("#temperature", "0")
        self.page.fill("#max-tokens", str(most))
        self.page.locator("#both").set_checked(both)
        self.page.click("#run")
        self.page.wait_for_selector("#run:not([disabled])", timeout=WAIT_MS)

    def text(self, place: str) -> str:
        return str(self.page.locator(f"#{place} .text").evaluate("node => node.textContent"))


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    pages = []

    def opened(url: str) -> Opened:
        found = Opened(browser.new_page())
        pages.append(found.page)
        found.page.on("console", lambda m: found.faults.append(m.text) if m.type in ("error", "warning") else None)
        found.page.on("pageerror", lambda error: found.faults.append(str(error)))
        found.page.on("request", lambda request: found.asked.append(request.url))
        found.page.set_viewport_size({"width": 1400, "height": 900})
        found.page.goto(url)
        return found

    yield opened
    for page in pages:
        page.close()


@in_browser
def test_a_text_is_streamed_and_its_drafted_tokens_are_marked(server, open_page):
    """Catches marks that are elsewhere than what the server drafted and a text that is not the server's."""
    asked = {"messages": [{"role": "user", "content": "abab"}], "temperature": 0, "max_tokens": MOST}
    opened = open_page(server.url)
    opened.write("abab")
    wanted = server.client().chat.completions.create(model="tiny", extra_body={"include_drafts": True}, **asked)
    assert opened.text("with") == opened.text("without") == wanted.choices[0].message.content
    marked = opened.page.locator("#with .drafted").all_text_contents()
    pieces = [text for text, is_drafted in wanted.model_extra["outrider"]["pieces"] if is_drafted]
    assert "".join(marked) == "".join(pieces) != ""
    assert opened.page.locator("#without .drafted").count() == 0
    assert "The texts are equal." in opened.page.inner_text("#outcome")
    counts = wanted.model_extra["outrider"]
    figures = opened.page.inner_text("#with .figures")
    assert f"{wanted.usage.completion_tokens} tokens · {counts['steps']} steps" in figures
    assert f"{counts['accepted']} of {counts['drafted']} drafted tokens accepted" in figures
    assert opened.faults == []
    assert all(url.startswith((server.url, "data:")) for url in opened.asked)


@in_browser
def test_the_figures_are_the_servers(server, open_page):
    """Catches a figure of another name, which would show a dash for ever."""
    opened = open_page(server.url)
    opened.write("cdcdcd", both=False)
    stats = lambda: httpx.get(f"{server.url}/stats").json()
    shown = lambda name: opened.page.inner_text(name)
    assert server.settled(lambda: shown("#tokens-per-step") == f"{stats()['tokens_per_step']:.2f}")
    assert shown("#state") == "live" and shown("#model") == "tiny"
    assert opened.page.locator("#depths li").count() == len(stats()["accepted_by_depth"]) > 0
    assert server.settled(lambda: shown("#running") == "0 of 2")
    names = ["#tokens-per-s", "#acceptance", "#first", "#gap-p50", "#gap-p99", "#ttft-p50", "#ttft-p99"]
    assert "–" not in map(shown, names)
    assert opened.page.locator("#without").is_hidden()
    shares = opened.page.locator("#time").get_attribute("aria-label")
    assert [part.rsplit(" ", 2)[0] for part in shares.split(", ")] == [
        "drafting", "verifying", "prefill", "other", "idle",
    ]  # fmt: skip
    assert opened.page.locator("#line").get_attribute("d").count("L") == 119
    assert opened.faults == []


EVIL = "</span><img id='evil' src=x onerror='window.ran = 1'><script>window.ran = 1</script>"


@in_browser
def test_a_text_that_is_html_stays_a_text(server, open_page):
    """A model may write anything.  Catches a text that becomes part of the page; every way that a text comes in."""
    choice = {"index": 0, "delta": {"content": EVIL}, "finish_reason": EVIL}
    drafts = {"pieces": [[EVIL, True], [EVIL, False]], "steps": 1, "drafted": 2, "accepted": 1}
    events = [{"choices": [choice], "outrider": drafts}, {"error": {"message": EVIL}}]
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    opened = open_page(server.url)
    opened.page.route("**/v1/**", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    opened.write("abab", both=False)
    assert opened.text("with") == EVIL * 2 and opened.page.inner_text("#outcome") == EVIL
    assert opened.page.locator("#evil").count() == 0 and opened.page.evaluate("window.ran") is None


@in_browser
def test_a_key_is_asked_for_and_kept_nowhere(talker, tmp_path, open_page):
    """Catches a key that is in the page after it was opened again."""
    secret = keys.add(tmp_path / "keys.json", "bird")
    with running(talker, keys=str(tmp_path / "keys.json")) as server:
        opened = open_page(server.url)
        opened.write("abab", both=False)
        assert "no key was given" in opened.page.inner_text("#outcome")
        opened.page.fill("#key", secret)
        opened.write("abab", both=False)
        assert opened.text("with") != ""
        opened.page.reload()
        assert opened.page.input_value("#key") == ""


@in_browser
def test_all_text_has_enough_contrast(server, open_page):
    """4.5 to 1, as WCAG AA asks of text."""
    opened = open_page(server.url)
    opened.write("ijij", most=12)
    opened.page.wait_for_timeout(1200)
    for scheme in ("light", "dark"):
        opened.page.emulate_media(color_scheme=scheme)
        opened.page.wait_for_timeout(100)
        assert opened.page.evaluate(FAINT) == [], scheme
