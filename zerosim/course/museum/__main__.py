"""Writes the museum's page and its pictures: ``python -m zerosim.course.museum docs``."""

import sys
from pathlib import Path

from zerosim.course.museum.story import all_stories, page

if __name__ == "__main__":
    folder, stories = Path(sys.argv[1]), all_stories()
    (folder / "museum.md").write_text(page(stories), encoding="utf-8")
    for story in stories:
        (folder / "assets" / f"museum_{story.exhibit.name}.svg").write_text(story.svg(), encoding="utf-8")
