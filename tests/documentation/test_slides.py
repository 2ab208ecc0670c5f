"""The lectures' text is complete; each of its parts becomes a slide with its picture, and its answer behind a key."""

import re

import pytest

from docs import slides
from tests.architecture.source import ROOT

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
