"""What has no picture is refused by the function that makes the data, in words of the picture."""

import pytest

from zerosim.course.figures.latency_wall import latency_wall_data
from zerosim.course.figures.losses import format_losses_data
from zerosim.course.figures.published import published_data


@pytest.mark.parametrize("said", [{"ranks": 1}, {"worlds": (1, 2)}, {"worlds": ()}, {"sizes": ()}],
                         ids=str)
def test_a_latency_wall_needs_messages(said):
    with pytest.raises(ValueError, match="a latency wall takes lengths of vectors and worlds of 2 ranks at least"):
        latency_wall_data(**said)


@pytest.mark.parametrize(("said", "words"), [
    ({"names": ("fp31",)}, "found 'fp31' and"), ({"names": ()}, "found 0 and"), ({"steps": 6, "window": 7}, "and 7"),
    ({"steps": 6, "window": 0}, "means of 1 to 6 steps; found 5 and 0")], ids=str)
def test_losses_of_formats_need_formats_that_there_are_and_enough_steps(said, words):
    with pytest.raises(ValueError, match=words):
        format_losses_data(**said)


def test_a_subject_that_no_run_settles_has_no_picture():
    with pytest.raises(ValueError, match="no run settles a published number about shapes; those that runs settle are"):
        published_data(("shapes",))
