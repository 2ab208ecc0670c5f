"""The lectures' text is complete; each of its parts becomes a slide with its picture, and its answer behind a key."""

import re

import pytest

from docs import slides
from tests.architecture.source import ROOT
from tests.display.browser import needs_browser, open_tab

TEXT = (ROOT / "docs/lectures.md").read_text(encoding="utf-8")
LECTURES = list(slides.lectures(TEXT))


def test_three_lectures_take_90_minutes_each():
    assert [sum(part.minutes for part in lecture.parts) for lecture in LECTURES] == [90, 90, 90]
    headings = re.findall("^### ", TEXT, re.M)
    assert sum(len(lecture.parts) for lecture in LECTURES) == len(headings)  # none is written in another way


def test_every_picture_is_there_and_most_of_the_figures_and_notebooks_are_used():
    shown = "".join(part.shown for lecture in LECTURES for part in lecture.parts)
    pictures, notebooks = (set(re.findall(pattern, shown)) for pattern in (
        r"\(\.\./figures/(.+?)\)", r"\(\.\./notebooks/(.+?)\)"))
    assert {name for name in pictures if not (ROOT / "figures" / name).is_file()} == set()
    assert {name for name in notebooks if not (ROOT / "notebooks" / name).is_file()} == set()
    assert len(pictures) >= 10
    assert len(notebooks) >= 10


def test_a_part_is_a_slide_with_its_question_and_then_the_answer():
    found = slides.slides(LECTURES[0])
    kinds = [cell.metadata["slideshow"]["slide_type"] for cell in found.cells]
    assert kinds == ["slide"] + ["slide", "fragment", "notes"] * len(LECTURES[0].parts)
    first, answer, minutes = found.cells[1:4]
    assert '<img alt="The distance from one number to the next' in first.source
    assert "src=\"data:image/svg+xml;base64," in first.source
    assert "](.." not in first.source
    assert "Run *notebook 2*, up to its first picture." in first.source
    assert "**Ask:** a bf16 weight of 1.0" in first.source
    assert "> " not in first.source
    assert answer.source.startswith("**At 1.0. Below 1 the numbers")
    assert minutes.source == "20 minutes"
    assert found.metadata["title"] == "Lecture 1: Numbers and rings"  # of the page


@pytest.mark.parametrize("missing", ["**Ask:** why?", "> Because."])
def test_a_part_without_a_question_or_an_answer_is_refused(missing):
    text = "## Lecture 1: A\n\nAim.\n\n### One (5 min)\n\n**Ask:** why?\n\n> Because.\n"
    assert len(next(slides.lectures(text)).parts) == 1
    with pytest.raises(ValueError, match="the part 'One' needs a question"):
        list(slides.lectures(text.replace(missing, "")))


PAGE = """<html><head><script src="{require}"></script></head><body><div class="reveal"><div class="slides"><section>
<h2>Why?</h2><div class="fragment"><p>Because.</p></div><aside class="notes">5 minutes</aside></section></div></div>
<script>require(["{reveal}"], () => document.querySelector(".reveal").classList.add("ready"))</script></body></html>"""
REQUIRE = """function require([module], then) {{
  const script = document.createElement("script");
  Object.assign(script, {{src: module, onload: then}}).dataset.requiremodule = module;
  document.head.append(script);
}}"""
SHOWS = """new Promise(done => {
  const look = () => done({text: document.body.innerText,
    answer: document.querySelector(".fragment p").checkVisibility(),
    said: document.querySelector(".missing") !== null, ready: document.querySelector(".reveal.ready") !== null});
  const wait = () => document.querySelector(".missing, .reveal.ready") ? look() : requestAnimationFrame(wait);
  document.readyState === "complete" ? wait() : addEventListener("load", wait);
})"""


@needs_browser
@pytest.mark.parametrize("missing", ["require.js", "reveal.js", None])
def test_no_answer_shows_by_itself_where_reveal_cannot_be_loaded_and_a_click_shows_it(tmp_path, missing):
    for name, text in (("require.js", REQUIRE.format()), ("reveal.js", "")):
        if name != missing:
            (tmp_path / name).write_text(text, encoding="utf-8")
    page = tmp_path / "lecture.html"
    page.write_text(slides.guarded(PAGE.format(require="require.js", reveal="reveal.js")), encoding="utf-8")
    with open_tab() as tab:
        tab.go(page.as_uri())
        found = tab.evaluate(SHOWS)
        assert found["said"] is (missing is not None)
        assert found["ready"] is found["answer"] is (missing is None)  # then reveal.js, not the page, hides it
        if missing is not None:
            assert "could not be loaded" in found["text"]
            assert "Because." not in found["text"]
            assert "5 minutes" not in found["text"]
            tab.evaluate("document.querySelector('summary').click()")
            assert tab.evaluate("document.body.innerText").endswith("Because.")
