"""The lesson on lost updates, computed once for each question in all tests."""

from functools import cache

from zerosim.course.lost_updates import lesson
from zerosim.course.lost_updates.lesson import LostUpdates, Question


@cache
def lost_updates(question: Question) -> LostUpdates:
    return lesson.lost_updates(question)
