"""An answer that never ends is refused; Ctrl-C stays Ctrl-C, and an answer that ends is never struck afterwards."""

import signal
import threading
import time

import pytest

from tests.course.puzzles.answers import refusal
from zerosim.course import puzzles
from zerosim.course.puzzles import grading, score, solutions, watching

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


def catching_a_few(rank, x):
    """Catches one interrupt after the other, some times, and then answers rightly."""
    for _ in range(5):
        try:
            while True:
                pass
        except BaseException:
            continue
    return solutions.mean(rank, x)


def ignoring(rank, x):
    """Ctrl-C is ignored from here on."""
    signal.signal(signal.SIGINT, getattr(signal, "SIG_" + "IGN"))
    while True:
        pass


@pytest.fixture
def short(monkeypatch):
    """Limits that nobody waits for."""
    monkeypatch.setattr(watching, "SECONDS", 0.05)
    monkeypatch.setattr(watching, "WAITING", 3600.0)


ENDLESS = "it has not ended after 0.05 seconds of the processor; look for a loop that never ends."


def test_an_answer_that_never_ends_is_refused_also_where_it_catches_interrupts_or_ignores_ctrl_c(short):
    for name, answer, case in (("ring", turning, "N=4 (n=4)"), ("ring", calling, "N=4 (n=4)"),
                               ("mean", catching, "N=4 (n=1)"), ("mean", catching_a_few, "N=4 (n=1)"),
                               ("ring", ignoring, "N=4 (n=4)")):
        assert refusal(name, answer) == f"On {case} {ENDLESS}"
    graded = grading.grade_ddp(lambda *given: turning(None, None))
    assert f"On N=4 {ENDLESS}" in graded.sentence


def test_any_block_may_be_limited_as_the_reading_of_a_file_is(short):
    with pytest.raises(score.Refused, match="On here it has not ended after"), watching.limited("here"):
        turning(None, None)


def test_an_answer_that_waits_and_computes_nothing_is_refused_by_the_clock(monkeypatch):
    monkeypatch.setattr(watching, "WAITING", 0.1)
    assert refusal("ring", waiting) == "On N=4 (n=4) it has not ended after 0.1 seconds; look for what it waits for."


def test_time_that_others_take_is_not_the_answers(monkeypatch):
    """The budget is of the processor's time of the thread that runs the answer: another thread may take any."""
    monkeypatch.setattr(watching, "SECONDS", 0.1)
    done, burnt = threading.Event(), threading.Event()

    def burn():
        began = time.thread_time()
        while time.thread_time() - began < 0.15:
            pass
        burnt.set()
        done.wait()

    thread = threading.Thread(target=burn)
    thread.start()

    def answer(rank, x):
        burnt.wait()
        return solutions.mean(rank, x)

    try:
        assert puzzles.check("mean", answer).passed
    finally:
        done.set()
        thread.join()


def test_ctrl_c_is_not_taken_for_the_end_of_the_time():
    def answer(rank, x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        puzzles.check("ring", answer)


def test_a_timer_of_the_callers_own_and_its_handler_are_there_again_afterwards():
    before = signal.signal(signal.SIGALRM, lambda *given: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 3600)
        assert puzzles.check("mean", solutions.mean).passed
        assert 3500 < signal.setitimer(signal.ITIMER_REAL, 0)[0] <= 3600
        assert signal.getsignal(signal.SIGALRM).__name__ == "<lambda>"
    finally:
        signal.signal(signal.SIGALRM, before)
