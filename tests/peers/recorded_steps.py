"""Steps of DDP, FSDP2 and DeepSpeed that `zerosim.frameworks.hooks` records: right ones, and each broken on purpose.

Two steps of two micro-batches, of which the second is recorded. The bugs are of a user's script, or put into the
library for one object; the settings of a record are what was meant.
"""

import contextlib
import math
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from zerosim.frameworks import hooks

CLIP, EPSILON, MICRO_BATCHES = 0.05, 1e-4, 2


def record(folder: str, cases: list[tuple[str, str, str]]) -> None:
    """Records a step of each (framework, compute format, mistake) into a folder of its name."""
    for case in cases:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.ReLU(), torch.nn.Linear(9, 5))
        model[2].bias.requires_grad_(case[1:] != ("fp32", "right"))  # frozen there
        run = DeepSpeedRun if case[0].startswith("deepspeed") else TorchRun
        run(model, *case).train(Path(folder, "-".join(case)))


def refused() -> list[str]:
    """What is said of optimizers of another rule, and of none."""
    model, made, said = torch.nn.Linear(2, 2), torch.optim, []
    rules = [kind(model.parameters(), lr=0.1) for kind in (made.NAdam, made.RMSprop)]
    rules += [made.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5), None]
    rules += [made.AdamW(model.parameters(), maximize=True)]
    for optimizer in rules:
        try:
            with hooks.recorded(model, "nowhere", optimizer):
                said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


class TorchRun:
    """DDP or FSDP2."""

    def __init__(self, model, framework, compute, mistake):
        self.model, self.mistake, self.rank = model, mistake, dist.get_rank()
        if framework == "ddp":
            self.model = DistributedDataParallel(model)
        else:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            for module in (model[0], model[2], model):
                fully_shard(module, **({"mp_policy": policy} if compute == "bf16" else {}))
        self.sharded = framework == "fsdp2"
        self.optimizer = self.made(self.model.parameters())
        if mistake == "no average":
            if self.sharded:
                for module in (model[0], model[2], model):
                    module.set_force_sum_reduction_for_comms(True)  # gloo has no other with a factor
                    module.set_gradient_divide_factor(1.0)
            else:
                self.model.register_comm_hook(None, summed)

    def made(self, parameters):
        epsilon = 1e-2 if self.mistake == "wrong epsilon" else EPSILON
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1, eps=epsilon)

    def train(self, folder):
        """One step, and one that is recorded."""
        self.step(1)
        with self.recorded(folder):
            if self.mistake == "missing micro-batch":
                self.drop_a_micro_batch()
            self.step(2)

    @property
    def clip(self):
        """Clipping hides a factor of all gradients."""
        return None if self.mistake == "no average" else CLIP

    def recorded(self, folder):
        return hooks.recorded(self.model, folder, self.optimizer, clip_norm=self.clip, epsilon=EPSILON)

    def drop_a_micro_batch(self):
        """Rank 1 hands on zeros in place of the gradient of its last micro-batch, as if it had no data left."""
        seen = {}

        def dropped(gradient, name):
            seen[name] = seen.get(name, 0) + 1
            return torch.zeros_like(gradient) if (self.rank, seen[name]) == (1, MICRO_BATCHES) else gradient
        for name, parameter in hooks.TorchStep(self.model, None).local().items():
            parameter.register_hook(lambda gradient, name=name: dropped(gradient, name))

    def batch(self, step, j):
        generator = torch.Generator().manual_seed(100 * step + 10 * j + self.rank)
        return torch.randn(4, 6, generator=generator), torch.randn(4, 5, generator=generator)

    def step(self, step):
        parameters = list(self.model.parameters())
        for j in range(MICRO_BATCHES):
            last = j == MICRO_BATCHES - 1
            alone = not self.sharded and (not last or self.mistake == "clipped by a local norm")
            with self.model.no_sync() if alone else contextlib.nullcontext():
                x, target = self.batch(step, j)
                (((self.model(x).float() - target) ** 2).mean() / MICRO_BATCHES).backward()
        if self.clip is None:
            pass
        elif self.mistake != "clipped by a local norm":
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        elif self.sharded:  # each shard by the norm of that shard
            locals_ = [parameter.grad.to_local() for parameter in parameters]
            norm = math.sqrt(sum(float((one**2).sum()) for one in locals_))
            for one in locals_:
                one.mul_(min(1.0, CLIP / (norm + 1e-6)))
        else:  # each rank its own gradient, before an average by hand
            torch.nn.utils.clip_grad_norm_(parameters, CLIP)
            for parameter in parameters:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        if not (self.mistake == "stale shard" and self.rank == 1 and step == 2):
            self.optimizer.step()
        self.optimizer.zero_grad()


def summed(state, bucket):
    """A communication hook that forgets to divide."""
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


class DeepSpeedRun(TorchRun):
    """DeepSpeed's stage 1, 2 or 3, by its own engine."""

    def __init__(self, model, framework, compute, mistake):
        self.mistake, self.rank, self.sharded = mistake, dist.get_rank(), False
        stage = int(framework[-1])
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": MICRO_BATCHES,
                  "gradient_clipping": self.clip or 0.0, "zero_allow_untested_optimizer": True,
                  "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
        config |= {"bf16": {"enabled": True}} if compute == "bf16" else {}
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=self.made(model.parameters()), config=config)
        self.model, zero = self.engine.module, self.engine.optimizer
        if mistake == "no average":
            undo_the_division(zero)
        if mistake == "clipped by a local norm":
            keep_the_norm_local(zero)

    def recorded(self, folder):
        return hooks.recorded(self.engine, folder, epsilon=EPSILON)

    def step(self, step):
        inner = self.engine.optimizer.optimizer
        if self.mistake == "stale shard" and self.rank == 1 and step == 2:
            inner.step = lambda *_, **__: None
        for j in range(MICRO_BATCHES):
            x, target = self.batch(step, j)
            y = self.engine(x.to(next(self.engine.module.parameters()).dtype)).float()
            self.engine.backward(((y - target) ** 2).mean())
            self.engine.step()


def undo_the_division(zero):
    """Leaves the sum over ranks undivided: by DeepSpeed's own switch, or where its stage 3 asks by what to divide."""
    zero.gradient_average = False
    zero._gradient_averaging_world_size = lambda parameters, ranks: 1


def keep_the_norm_local(zero):
    """The norm of a rank's own shard, without the all-reduce over ranks."""
    whole = zero.get_grad_norm_direct

    def local(*given, **named):
        shared, deepspeed.comm.all_reduce = deepspeed.comm.all_reduce, lambda *_, **__: None
        try:
            return whole(*given, **named)
        finally:
            deepspeed.comm.all_reduce = shared
    zero.get_grad_norm_direct = local
