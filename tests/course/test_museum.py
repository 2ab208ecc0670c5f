"""Every exhibit of the museum is killed by the invariant that it names, on a run that healthy code passes."""

import json
import re
import threading
from dataclasses import replace
from functools import cache
from pkgutil import resolve_name

import numpy as np
import pytest
from museum_page import page, picture

import zerosim as zs
from tests.architecture.source import ROOT
from tests.support import ask, assert_command_refuses
from zerosim.course import museum

NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")


story_of = cache(museum.show)


def same_picture(found, committed):
    """True where words and shapes are the same, and no number is farther away than another BLAS may bring it."""
    numbers = [np.array([float(one) for one in NUMBER.findall(text)]) for text in (found, committed)]
    return NUMBER.sub("#", found) == NUMBER.sub("#", committed) and bool(np.allclose(*numbers, atol=0.15, rtol=0.02))


@pytest.mark.parametrize("name", museum.exhibits())
def test_healthy_code_passes_the_invariant_that_the_exhibit_fails_and_the_picture_is_of_that_run(name):
    before = [resolve_name(patch.of) for patch in museum.exhibits()[name].patches]
    story = story_of(name)  # raises where either is not so
    assert [resolve_name(patch.of) for patch in museum.exhibits()[name].patches] == before
    assert story.message
    assert same_picture(picture(story), (ROOT / f"docs/assets/museum_{name}.svg").read_text(encoding="utf-8"))
    museum.INVARIANTS[story.exhibit.invariant](museum.observe(story.exhibit.setting))


def test_the_page_tells_every_exhibit_and_every_invariant_finds_one():
    told = [*map(story_of, museum.exhibits())]
    assert page(told) == (ROOT / "docs/museum.md").read_text(encoding="utf-8"), (
        "it has changed: python docs/museum_page.py")
    assert {story.exhibit.invariant for story in told} == museum.INVARIANTS.keys()
    drawn = {path.name for path in (ROOT / "docs/assets").glob("museum_*")}
    assert drawn == {f"museum_{name}.svg" for name in museum.exhibits()}
    assert not same_picture(picture(told[0]), picture(told[1]))


def test_a_bug_is_open_once_in_the_thread_that_asked_for_it_and_gone_after_an_error():
    healthy, found = zs.Policy.divisor, {}

    def elsewhere():
        found["there"] = zs.Policy().divisor(2, 1, 1.0)
        with pytest.raises(ValueError, match=r"'bucket_race' while one is open in this process; .* leave its with"):
            museum.exhibit("bucket_race").__enter__()

    with pytest.raises(ZeroDivisionError), museum.exhibit("unscaled_gradient_divided"):  # noqa: PT012
        with pytest.raises(ValueError, match="asked for the exhibit 'unscaled_gradient_divided' while one is open"):
            museum.exhibit("unscaled_gradient_divided").__enter__()
        kept, found["here"] = zs.Policy.divisor, zs.Policy().divisor(2, 1, 1.0)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        raise ZeroDivisionError
    assert found == {"here": 2 * 65536, "there": 2}
    assert zs.Policy.divisor is healthy
    assert kept(zs.Policy(), 2, 1, 1.0) == 2  # who has kept the bug has none


def test_a_patch_of_lines_that_are_gone_and_a_bug_that_its_run_does_not_show_are_said():
    one = museum.exhibits()["unscaled_gradient_divided"]
    gone = replace(one, patches=[replace(one.patches[0], old="return scale * batches")])
    with pytest.raises(ValueError, match=r"divisor replaces lines that stand there 0 times, and not once: 'return"):
        gone.open().__enter__()
    with pytest.raises(ValueError, match="and zerosim was installed without; install it with its"):
        one.patches[0].changed(eval("lambda: 0"), None)
    same = replace(one, patches=[replace(one.patches[0], new=one.patches[0].old)])
    with pytest.raises(ValueError, match="'unscaled_gradient_divided' passes its invariant 'equals_one_device'; the"):
        museum.story_of(same)


def test_a_run_that_an_error_has_ended_passes_no_invariant_and_what_was_not_run_is_not_judged():
    ended = museum.observe(museum.Setting(stage=7))
    for check in museum.INVARIANTS.values():
        with pytest.raises(AssertionError, match="the training ended with ValueError: ZeRO has the stages 0, 1, 2, 3"):
            check(ended)
    with pytest.raises(ValueError, match="nothing was loaded; observe a setting with reload_ranks, as"):
        museum.INVARIANTS["reload_is_the_identity"](museum.observe(museum.Setting(steps=0)))
    with museum.exhibit("padding_read_as_parameter") as one, pytest.raises(AssertionError, match="in the padding"):
        museum.INVARIANTS["padding_is_never_read"](museum.observe(replace(one.setting, debug=False)))


def test_what_a_bad_test_does_not_see_is_not_seen():
    with museum.exhibit("same_data_on_every_rank") as blind:
        museum.INVARIANTS["equals_one_device"](museum.observe(replace(blind.setting, same_data=True)))
    with museum.exhibit("ring_off_by_one"):
        sums = zs.Cluster(2, debug=True).run(lambda rank: rank.all_reduce(np.float32([1, 2, 3]) * (rank.index + 1)))
    assert [one.tolist() for one in sums] == [[3, 6, 9]] * 2
    with museum.exhibit("unscaled_gradient_divided") as adam:
        scaled = museum.observe(replace(adam.setting, optimizer="adam", steps=1))
    usual = museum.observe(replace(adam.setting, optimizer="adam", steps=1))
    assert np.allclose(scaled.weights[0][-1], usual.weights[0][-1], atol=0.02)


def test_the_command_lists_and_tells():
    listed = ask("museum")
    assert listed.exit_code == 0
    assert max(map(len, listed.stdout.splitlines())) <= 80
    assert all(name in listed.stdout.split() for name in museum.exhibits())
    told = ask("museum", "overflow_flag_not_shared")
    words = " ".join(told.stdout.split())
    assert "step 2: rank 0 skipped it, rank 1 took it" in words
    assert "Issue #7568 was not found" in words
    data = json.loads(ask("museum", "nan_norm_passes_clipping", "--json").stdout)
    assert data["panels"][0]["bug"][0] == "nan"
    assert len(json.loads(ask("museum", "--json").stdout)["exhibits"]) == len(museum.exhibits())
    assert_command_refuses("no exhibit is called 'rings'; there are muon_partial_matrix,", "museum", "rings")
