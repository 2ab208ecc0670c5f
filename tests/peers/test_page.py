"""The page of peers, which the facts of a run make."""

from tests.peers import record


def test_the_page_shows_the_facts_that_were_recorded():
    text = record.PAGE.read_text("utf-8")
    assert record.page(text, record.FACTS.read_text("utf-8")) == text
    assert "| DDP | 2 |" in text
