"""The parts of an engine by what was asked of it: the one place that chooses among options.

Without options the parts are those of the plain step. An option is a file that subclasses some of them, and a row here:
state on the host or on disk `zero.offloaded_step`, hybrid sharding `zero.hybrid`, ZeRO++ `zero.zeropp`, the order of
micro-batches `zero.micro_batch_order`. `zerosim.options` reads and checks them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from zerosim.numerics.kernels import do_nothing
from zerosim.numerics.loss_scale import LossScaler
from zerosim.numerics.places import DEVICE
from zerosim.numerics.policy import Policy
from zerosim.options import StepOptions
from zerosim.ranks.mesh import Mesh
from zerosim.ranks.rank import Rank
from zerosim.zero.factors import FactorObserver
from zerosim.zero.gradients import Observer, Reducer, Reduction
from zerosim.zero.hybrid import HybridReduction, check_hybrid, lay_out_inside
from zerosim.zero.layout import Layout, lay_out
from zerosim.zero.micro_batch_order import ExactSquares, OrderedReduction, check_order, refuse_factors
from zerosim.zero.offload import OffloadStore
from zerosim.zero.offloaded_step import (
    CopyToDevice,
    HostUpdate,
    OffloadedAllGather,
    OffloadedParamGroup,
    OffloadedReducer,
    OffloadedUnsharder,
    OffloadedUpdate,
)
from zerosim.zero.param_group import ParamGroup
from zerosim.zero.placements import SHARDED, Stage, Store
from zerosim.zero.unshard import ParameterAllGather, UnitGather, Unsharder
from zerosim.zero.update import Squares, Update
from zerosim.zero.zeropp import QuantizedReduction, ZeroPlusPlusGather, check_parts


@dataclass(slots=True)
class Plugs:
    """The parts of one rank's engine. ``shards`` is a handle of the rank among those that have a shard each."""

    shards: Rank
    store: Store
    gather: UnitGather | None
    lay_out: Callable[..., Layout] = lay_out
    param_group: type[ParamGroup] = ParamGroup
    reducer: type[Reducer] = Reducer
    reduction: Callable[..., Reduction] = Reduction
    unsharder: type[Unsharder] = Unsharder
    all_gather: type[ParameterAllGather] = ParameterAllGather
    update: type[Update] = Update
    squares: Squares = field(default_factory=Squares)
    check: Callable[[Sequence[ParamGroup]], None] = do_nothing


def plugs_of(rank: Rank, stage: Stage, policy: Policy, options: StepOptions) -> Plugs:
    """The parts of an engine with these options; raises ValueError as `check_options` does."""
    check_options(options, stage, policy)
    plugs = Plugs(rank, Store(rank), UnitGather() if stage.parameters is SHARDED else None)
    if options.by_micro_batch:
        plugs.reduction, plugs.squares, plugs.check = OrderedReduction, ExactSquares(), refuse_factors
    if options.zeropp:
        _plug_zeropp(plugs, options)
    elif options.mesh:
        _plug_mesh(plugs, options)
    if not options.offload.is_none:
        _plug_offload(plugs, options)
    return plugs


def check_options(options: StepOptions, stage: Stage, policy: Policy) -> None:
    """Raises ValueError for options that do not go with a stage or a policy."""
    if options.by_micro_batch:
        check_order(stage, policy)
    if options.zeropp:
        check_parts(options.zeropp, stage, policy)
    elif options.mesh:
        check_hybrid(stage)


def observer_of(rank: Rank, wanted: frozenset[str], loss_scale: LossScaler) -> Observer:
    """The observer of layers: of the factors of ``wanted`` weights, or of nothing."""
    return FactorObserver(rank, wanted, loss_scale) if wanted else Observer()


def _plug_zeropp(plugs: Plugs, options: StepOptions) -> None:
    asked, mesh = options.parts, cast(Mesh, options.mesh)  # there is none without a mesh
    if plugs.gather:
        plugs.gather = ZeroPlusPlusGather(plugs.shards, mesh, asked)
    if asked.gradients is not None:
        plugs.reduction = partial(QuantizedReduction, mesh=mesh, form=asked.gradients)


def _plug_mesh(plugs: Plugs, options: StepOptions) -> None:
    mesh = cast(Mesh, options.mesh)
    rank, plugs.shards = plugs.shards, mesh.inside(plugs.shards)
    if mesh.nodes > 1:
        plugs.lay_out = partial(lay_out_inside, nodes=mesh.nodes)
        plugs.reduction = partial(HybridReduction, replicas=mesh.across(rank))


def _plug_offload(plugs: Plugs, options: StepOptions) -> None:
    places = options.offload
    plugs.store = store = OffloadStore(plugs.store.rank, places)
    plugs.param_group, plugs.reducer = OffloadedParamGroup, OffloadedReducer
    plugs.unsharder, plugs.all_gather = OffloadedUnsharder, OffloadedAllGather
    plugs.update = OffloadedUpdate if places.optimizer == DEVICE else HostUpdate
    if plugs.gather is None and places.parameters != DEVICE:
        plugs.gather = CopyToDevice(store)
