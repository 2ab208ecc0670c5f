"""The lesson on lost updates, computed once for each question in all tests."""

from functools import cache

from zerosim import course
from zerosim.course.lost_updates import LostUpdates, LostUpdatesQuestion


@cache
def lost_updates(question: LostUpdatesQuestion) -> LostUpdates:
    return course.lost_updates.lost_updates(question)
