"""Optimizers by name, each with a learning rate that suits a small GPT, and what matrix optimizers leave to AdamW."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from zerosim import optim
from zerosim.models.units import Model
from zerosim.numerics.checks import did_you_mean
from zerosim.optim.base import Optimizer
from zerosim.zero.param_group import Group

# Of 1, 2 and 5 times powers of ten, the one of the lowest loss on text held out after 100 steps of gpt-micro on the
# text that comes along, with four ranks and all other options as they are by default (2026-11-21).
LEARNING_RATES: Mapping[str, float] = MappingProxyType({
    "adafactor": 0.02, "adagrad": 0.005, "adam": 0.002, "adamw": 0.002, "adan": 0.002, "kfac": 0.05, "lamb": 0.01,
    "lars": 2.0, "lion": 0.001, "momentum": 0.1, "muon": 0.05, "rmsprop": 0.0005, "sgd": 0.2, "shampoo": 0.1,
    "soap": 0.01})
COMPANION = "adamw"  # updates what an optimizer of matrices does not: vectors, and embeddings


def known_optimizers() -> dict[str, type[Optimizer]]:
    """The package's optimizers by their class's name in lower case."""
    kinds = [getattr(optim, name) for name in optim.__all__]
    return {kind.__name__.lower(): kind for kind in kinds
            if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer}


def learning_rate_of(name: str) -> float:
    """The learning rate that an optimizer is given unless told otherwise; ValueError for an unknown name."""
    return LEARNING_RATES[_kind(name).__name__.lower()]


def optimizer_named(name: str, lr: float) -> Optimizer:
    """An optimizer of the package by its class's name in any case; ValueError lists them."""
    made: Optimizer = _kind(name)(lr=lr)  # type: ignore[call-arg]
    return made


def is_of_matrices(optimizer: Optimizer) -> bool:
    """True where it updates the matrices of linear layers, and others are to update the rest."""
    return optimizer.cut in ("matrix", "layer")


def companions(optimizer: Optimizer, model: Model) -> list[Group]:
    """AdamW for vectors, embeddings and a tied head, where the optimizer is one of matrices; else no group.

    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers", which are what it is for.
    """
    hidden = frozenset(name for unit in model.units for name in unit.factored)
    rest = [name for name in model.shapes if name not in hidden]
    if not is_of_matrices(optimizer) or not rest:
        return []
    return [Group(*rest, optimizer=optimizer_named(COMPANION, LEARNING_RATES[COMPANION]))]


def _kind(name: str) -> type[Optimizer]:
    known = known_optimizers()
    kind = known.get(str(name).lower())
    if kind is None:
        raise ValueError(f"no optimizer is called {name!r}; choose one of {', '.join(sorted(known))}"
                         f"{did_you_mean(str(name).lower(), known)}")
    return kind
