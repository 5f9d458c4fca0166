"""A claim about speed stands beside tokens/s, and in a result."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "scripts"))

import claims


@pytest.mark.parametrize("page", claims.pages(), ids=lambda page: page.name)
def test_a_page_claims_only_what_a_result_has(page: Path) -> None:
    """Catches a figure that outlived its measurement, and a speed-up over a baseline whose tokens/s nobody sees."""
    assert [str(each) for each in claims.complaints(page)] == []


def test_claims_without_evidence_are_found(tmp_path: Path) -> None:
    """Catches a check that finds nothing, whatever a page says."""
    page, link = tmp_path / "page.md", "([page](../benchmarks/pages/real-model.md))"
    real = "185 tokens/s with suffix, 130 without"
    said = {
        f"# Speed\n\n{real}: 1.48 times llama-server's {link}.": 0,
        "# Speed\n\n1.48 times as fast as plain decoding.": 2,  # neither tokens/s nor a result
        f"# Speed\n\n{real}: 9.87 times as fast {link}.": 1,
        f"# Speed\n\nIt generates 98,765 tokens/s {link}.": 1,
        f"# Speed\n\nIt takes 1.06 times as long, with 0.7 times the memory {link}.": 0,
        "# Speed\n\n| drafter | speed-up |\n| --- | ---: |\n| suffix | 1.48 |\n": 1,
        "# Speed\n\n```console\n1.48 times as fast\n```": 0,
    }
    for text, count in said.items():
        page.write_text(text)
        assert len(list(claims.complaints(page))) == count, text


def test_a_demo_s_report_is_read_without_its_marks(tmp_path: Path) -> None:
    """Catches a page of a run that boasts of a speed-up alone."""
    page = tmp_path / "report.html"
    page.write_text("<style>1.1 times plain</style><p>It is <b>1.48</b> times as fast as plain decoding</p>")
    assert len(list(claims.complaints(page))) == 1
    page.write_text(page.read_text() + "<p>185 tokens/s</p>")
    assert list(claims.complaints(page)) == []
