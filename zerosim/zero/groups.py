"""Parameter groups: which parameters differ from the others, and in what.

A group names parameters by patterns and says what is different for them; the first group that matches decides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from zerosim.models.units import Model
from zerosim.numerics.policy import Policy
from zerosim.optim.base import Optimizer
from zerosim.zero.layout import UnitShapes


class Group:
    """Parameters whose names match one of the patterns, and what is different for them.

    ``frozen``: not trained, no gradient, no optimizer state. ``compute``: the format of its weights at rest, instead of
    the policy's. ``optimizer``: instead of the engine's. Hyperparameters replace those of the optimizer, as in
    ``Group("*.bias", weight_decay=0.0)``. Patterns are a shell's: ``*``, ``?``, ``[abc]``.
    """

    def __init__(self, *patterns: str, frozen: bool = False, compute: str | None = None,
                 optimizer: Optimizer | None = None, **hyperparameters: Any) -> None:
        if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(f"a group needs patterns of parameter names, found {patterns!r}; "
                             "write Group('*.bias', ...)")
        if frozen and (optimizer is not None or hyperparameters):
            raise ValueError(f"the group {patterns} is frozen, and was given an optimizer or hyperparameters, which "
                             "nothing would read; leave them out, or leave frozen out")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ValueError(f"the group {patterns} was given optimizer={optimizer!r}; write zs.optim.Adam(lr=...)")
        self.patterns, self.frozen, self.compute = patterns, bool(frozen), compute
        self.optimizer, self.hyperparameters = optimizer, hyperparameters

    def matches(self, name: str) -> bool:
        """True where one of the patterns matches the parameter's name."""
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def __repr__(self) -> str:
        options = {"frozen": self.frozen or None, "compute": self.compute, "optimizer": self.optimizer,
                   **self.hyperparameters}
        said = [repr(pattern) for pattern in self.patterns]
        return f"Group({', '.join(said + [f'{k}={v!r}' for k, v in options.items() if v is not None])})"


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for one parameter: who updates it (None: frozen), and the precision policy it lives under."""

    optimizer: Optimizer | None
    policy: Policy


@dataclass(frozen=True, slots=True)
class Kin:
    """Parameters that rest alike: under one policy, all trained or all frozen. Units that have none are left out."""

    policy: Policy
    frozen: bool
    shapes: UnitShapes
    optimizers: dict[str, Optimizer]


def settings_of(model: Model, optimizer: Optimizer, policy: Policy, groups: Sequence[Group]) -> dict[str, Settings]:
    """By parameter name, what the groups leave and change.

    Raises ValueError for what is no group, for one that matches no parameter and for hyperparameters that the
    optimizer does not have.
    """
    _check(model, groups)
    found = {}
    for name in model.shapes:
        group = next((group for group in groups if group.matches(name)), None)
        found[name] = Settings(optimizer, policy) if group is None else _settings(group, optimizer, policy)
    return found


def kin_of(model: Model, settings: dict[str, Settings]) -> list[Kin]:
    """The parameters by what they have in common, in the order in which the model first names one of each."""
    keys = dict.fromkeys(_key(one) for one in settings.values())
    return [Kin(policy, frozen, dict(_shapes(model, settings, (policy, frozen))),
                {name: one.optimizer for name, one in settings.items()
                 if _key(one) == (policy, frozen) and one.optimizer is not None})
            for policy, frozen in keys]


def _key(one: Settings) -> tuple[Policy, bool]:
    return one.policy, one.optimizer is None


def _shapes(model: Model, settings: dict[str, Settings],
            key: tuple[Policy, bool]) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    for unit in model.units:
        shapes = {name: shape for name, shape in unit.shapes.items() if _key(settings[name]) == key}
        if shapes:
            yield unit.name, shapes


def _settings(group: Group, optimizer: Optimizer, policy: Policy) -> Settings:
    policy = policy if group.compute is None else replace(policy, compute=group.compute)
    if group.frozen:
        return Settings(None, policy)
    return Settings((group.optimizer or optimizer).for_group(group.hyperparameters), policy)


def _check(model: Model, groups: Sequence[Group]) -> None:
    if not isinstance(groups, list | tuple):
        raise ValueError(f"groups takes a list of Group, found {groups!r}; write [Group('*.bias', weight_decay=0.0)]")
    for group in groups:
        if not isinstance(group, Group):
            raise ValueError(f"groups takes a list of Group, found {group!r}; write Group('*.bias', weight_decay=0.0)")
        for pattern in group.patterns:
            if not any(fnmatchcase(name, pattern) for name in model.shapes):
                near = get_close_matches(pattern, model.shapes, 3) or list(model.shapes)[:5]
                raise ValueError(f"{group!r}: no parameter matches {pattern!r}; there are {', '.join(near)}")
