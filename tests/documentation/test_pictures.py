"""The pictures of the page that moves are those that ``make pictures`` takes, and small."""

import pytest
from PIL import Image

from docs import explore_pictures as pictures


@pytest.mark.parametrize("dark", pictures.THEMES)
def test_every_picture_has_its_windows_size_and_the_one_that_moves_takes_at_most_a_megabyte_and_a_half(dark):
    for name, (window, _, _) in pictures.PICTURES.items():
        path = pictures.ASSETS / f"{name}{dark}.png"
        with Image.open(path) as picture:
            assert (picture.size, picture.mode) == (window, "P")
        assert path.stat().st_size <= 150_000
    path = pictures.ASSETS / f"{pictures.MOVES}{dark}.gif"
    with Image.open(path) as moving:
        assert moving.size == tuple(round(side * pictures.SCALE) for side in pictures.WINDOW)
        assert moving.n_frames == pictures.FRAMES
    assert path.stat().st_size <= 1_500_000
