"""The glossary has every word that a notebook introduces, says it shortly, and leads to where it is met."""

import re
from collections import Counter

import pytest
from zerosim_site.readme_pages import glossary_terms

from tests.architecture.source import ROOT
from tests.documentation.reader import defined_in, forms, is_entry, notebook_files, plain, words_of
from zerosim.ranks import trace

TEXT = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
ENTRY = re.compile(r"^### (.+)\n((?:(?!#).*\n)+)", re.M)
ENTRIES = dict(ENTRY.findall(TEXT))
MET = re.compile(r"\]\(\.\./notebooks/([\w.]+)\)")
# Set in italics for their weight, not because they are introduced.
STRESSED = {"after", "before", "both", "causes", "each", "every", "first", "forward", "its own", "last", "lost",
            "never", "notice", "once", "only", "rests", "same", "then", "twice", "what", "when", "where"}


def test_every_heading_of_a_term_is_an_entry_and_stands_once():
    assert list(ENTRIES) == glossary_terms(TEXT)
    assert [term for term, count in Counter(map(plain, ENTRIES)).items() if count > 1] == []


@pytest.mark.parametrize("path", notebook_files(), ids=lambda path: path.stem)
def test_what_a_notebook_introduces_is_in_the_glossary(path):
    missing = {term for term in defined_in(path) - STRESSED if not is_entry(term, ENTRIES)}
    assert missing == set(), "add it to docs/glossary.md, or to STRESSED where it is set apart for its weight alone"


def test_every_notebook_is_named_in_an_entry_and_uses_the_word():
    words = {path.name: plain(words_of(path)) for path in notebook_files()}
    named = [(term, name) for term, entry in ENTRIES.items() for name in MET.findall(entry)]
    assert len(named) > 50
    assert sorted(name for _, name in named) == sorted(MET.findall(TEXT)), "a link stands outside of every entry"
    assert {name for name in words if name[0].isdigit()} == {name for _, name in named}
    assert [(term, name) for term, name in named if not any(form in words[name] for form in forms(term))] == []


def test_kinds_and_purposes_are_those_of_the_memory_and_the_trace():
    assert [kind for kind in trace.KINDS if plain(kind) not in plain(ENTRIES["kind"])] == []
    assert [purpose for purpose in trace.PURPOSES if purpose not in ENTRIES["purpose"]] == []
