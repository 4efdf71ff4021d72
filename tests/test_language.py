"""The English of pages and messages, as far as a list of phrases and a count of words can keep it."""

import re
from pathlib import Path

from messages import messages

ROOT = Path(__file__).parents[1]
GENERATED = ("keys.md", "faults.md")
PAGES = {p.name: p.read_text("utf-8") for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in GENERATED}
MOST_WORDS = {"theory.md": 2000, "derivations.md": 3350, "architecture.md": 1800, "evaluation.md": 1450}
MOST_WORDS |= {"troubleshooting.md": 1200}
OTHERS = 950  # words of a page that fits a screen or two
ALL = 20_500
README = 550  # words of prose: code, tables and links' addresses not counted
PHRASES = re.compile(  # what a translation sounds like: write what the field says
    r"learnt|that comes? along|goes on where|\b(?:is|are) (?:told|said) (?:to|by|at|in|with|of|as|how|which|what)\b"
    r"|speaks against|told apart|free of zero|\bMended\b|thereby|with the cure|has nothing to go on|nearly arrived"
    r"|(?:nats|rollouts|tokens|words|rows) a (?:response|prompt|token|second|line)|(?:Any|Some)body's|wins the less"
    r"|the way ours"
)


def prose(page: str) -> str:
    """Return a page without code, tables, pictures and addresses of links."""
    page = re.sub(r"(?ms)^```.*?^```$|^\|.*?$|!\[.*?\]\(.*?\)", "", page)
    return re.sub(r"\]\(.*?\)", "]", page)


def test_pages_are_short() -> None:
    """A how-to fits a screen or two, the README's prose two minutes, and the documentation an hour and a half."""
    words = {name: len(page.split()) for name, page in PAGES.items()}
    assert {name: n for name, n in words.items() if n > MOST_WORDS.get(name, OTHERS)} == {}
    assert sum(words.values()) <= ALL
    assert len(prose((ROOT / "README.md").read_text("utf-8")).split()) <= README


def test_every_page_says_which_kind_it_is() -> None:
    """Its first paragraph names a tutorial, a how-to, a reference or an explanation."""
    kinds = re.compile(r"Tutorial|How-to|Reference|Explanation")
    assert [name for name, page in PAGES.items() if not kinds.search(page.partition("\n\n")[2][:400])] == []


def test_no_text_reads_like_a_translation() -> None:
    """None of the phrases is in a page or a message."""
    texts = [*PAGES.values(), (ROOT / "README.md").read_text("utf-8"), *messages()]
    assert [(found[0], text[:80]) for text in texts if (found := PHRASES.search(text))] == []
