"""An answer cannot end the check itself: it exits, stops, or is endless, and is refused."""

import pytest

import zerosim as zs


def endless(rank, x):
    found = []
    found.append(found)
    return found


def exits(rank, x):
    raise SystemExit(0)


def stops(rank, x):
    raise GeneratorExit


def cannot_say(rank, x):
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no words")

    raise Mute


@pytest.mark.parametrize(("answer", "said"), [
    (endless, "rank 0 returned a list that contains itself."), (exits, "rank 0 raised SystemExit in line "),
    (stops, "rank 0 raised GeneratorExit in line "), (cannot_say, "rank 0 raised Mute in line ")])
def test_an_answer_that_leaves_by_another_door_is_refused_and_ends_nothing(answer, said):
    score = zs.puzzles.check("mean", answer)
    assert score.verdict == "refused"
    assert score.sentence.startswith(f"On N=1 (n=1) {said}")


def test_ctrl_c_is_no_answer():
    def pressed(rank, x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        zs.puzzles.check("mean", pressed)
