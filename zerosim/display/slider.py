"""A slider over the steps of a run, where ipywidgets is installed."""

from typing import Any

from zerosim.display.notebook import as_html
from zerosim.display.objects import step_view
from zerosim.ranks.inspect import Step, Steps

MOST_STEPS = 2000  # whose states are kept


def slider(steps: Steps) -> Any:
    """A widget: a slider, buttons that play, and under them the step as HTML. It takes all steps that are left.

    Raises ModuleNotFoundError where ipywidgets is not installed, before any step is taken, and ValueError where no
    step is left, or more than can be kept.
    """
    try:
        import ipywidgets
    except ImportError:
        raise ModuleNotFoundError("steps.slider() needs ipywidgets, which is not installed here; pip install ipywidgets"
                                  ", or walk by hand: for step in steps, and step.draw()") from None
    kept = _kept(steps)
    number = ipywidgets.IntSlider(value=1, min=1, max=len(kept), description="step", continuous_update=True,
                                  layout={"width": "60%"})
    play = ipywidgets.Play(value=1, min=1, max=len(kept), interval=700, description="play")
    ipywidgets.jslink((play, "value"), (number, "value"))
    page = ipywidgets.HTML(as_html(step_view(kept[0])))

    def turned(change: Any) -> None:
        page.value = as_html(step_view(kept[change["new"] - 1]))

    number.observe(turned, names="value")
    return ipywidgets.VBox([ipywidgets.HBox([play, number]), page])


def _kept(steps: Steps) -> list[Step]:
    """All steps that are left; the last one taken before, where it was the very last."""
    kept = []
    for step in steps:
        kept.append(step)
        if len(kept) > MOST_STEPS:
            steps.close()
            raise ValueError(f"a slider keeps every rank's state at each of at most {MOST_STEPS:,} steps, and this run "
                             'has more; step by="collective", or through a shorter program')
    if not kept:
        raise ValueError("no step is left to slide over: the run has ended, or it makes no step; make a new "
                         "step_through")
    return kept
