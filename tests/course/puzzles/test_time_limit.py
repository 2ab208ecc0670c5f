"""An answer that never ends is refused; Ctrl-C stays Ctrl-C, and an answer that ends is never struck afterwards."""

import threading

import pytest

from tests.course.puzzles.answers import refusal
from zerosim.course import puzzles
from zerosim.course.puzzles import grading, score, watching

pytestmark = pytest.mark.usefixtures("pythons_own_handler")


def turning(rank, x):
    while True:
        pass


def calling(rank, x):
    while True:
        rank.exchange(x, (rank.index + 1) % rank.size, x.copy(), (rank.index - 1) % rank.size)


def waiting(rank, x):
    threading.Event().wait()


def catching(rank, x):
    """Catches the interrupt on every rank, and then answers rightly."""
    try:
        while True:
            pass
    except BaseException:
        total = rank.all_reduce(x)
        total /= rank.size
        return total


def test_an_answer_that_never_ends_is_refused_also_where_it_catches_the_interrupt(monkeypatch):
    monkeypatch.setattr(watching, "SECONDS", 0.2)
    for name, answer, case in (("ring", turning, "N=1 (n=5)"), ("ring", calling, "N=1 (n=5)"),
                               ("ring", waiting, "N=1 (n=5)"), ("mean", catching, "N=1 (n=1)")):
        assert refusal(name, answer) == (f"On {case} it has not ended after 0.2 seconds; "
                                         "look for a loop that never ends.")
    graded = grading.grade_ddp(lambda *given: turning(None, None))
    assert "On N=1 it has not ended after 0.2 seconds" in graded.sentence


def test_ctrl_c_is_not_taken_for_the_end_of_the_time():
    def answer(rank, x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        puzzles.check("ring", answer)


def test_an_alarm_that_strikes_while_it_is_put_off_is_put_off_all_the_same(monkeypatch):
    struck = []

    def put_off(self, its=watching._Alarm.put_off):
        if not struck:
            struck.append(self)
            self.has_rung = True
            raise KeyboardInterrupt
        its(self)

    monkeypatch.setattr(watching._Alarm, "put_off", put_off)
    with pytest.raises(score.Refused, match="it has not ended after 60 seconds"), watching.limited("here"):
        pass
    struck[0].join()  # without end, if it were not put off


def test_outside_the_main_thread_nobody_is_interrupted():
    begun = []

    def watched():
        before = threading.enumerate()
        with watching.limited("here"):
            begun.append(set(threading.enumerate()) - set(before))

    thread = threading.Thread(target=watched)
    thread.start()
    thread.join()
    assert begun == [set()]  # there is nothing that could interrupt anybody
