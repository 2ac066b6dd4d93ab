"""The ways to train that ``engine.py`` compares: one model, one stream of batches, one clipping, each set up fairly.

Every policy starts from the same model object (same seed), AdamW in torch's fused kernel, and clips the global norm.
What is set beyond a library's defaults, and why:

- DDP: ``gradient_as_bucket_view``, which saves it a copy of the gradients.
- FSDP2: every block its own group, the root as it comes (gathered until backward). ``fsdp2-kept`` does not reshard.
- DeepSpeed twice. ``default``: stage and clipping alone (its clipping is 1.0 where nothing is said). ``set``: stages
  1 and 2 reduce to the owner (``use_multi_rank_bucket_allreduce`` off: 2Ψ instead of 3Ψ); stage 3 without its limits
  below which a model is kept whole, so that it is stage 3 (two blocks live at once, as in ours); buckets as large as
  everyone's.
- ``zero1`` and ``zero2`` as the launcher trains this model: updated parameters arrive during the next forward
  (``zero.overlap_gather``); ``zero1-waits`` and ``zero2-waits`` wait for them at the end of a step.
- ``zero3-trims`` leaves the heap of the process as glibc has it, ``fsdp2-heap`` gives FSDP2 the engine's setting
  (``launcher/engine/heap.py``): what of the ratio is the allocator's.
- ``zero0-send`` to ``zero3-send``: ranks send through sockets, as gloo's own collectives do, instead of reading each
  other's memory (``zero.same_host``, ``launcher/engine/comm/host.py``): what of the ratio is the way that bytes take.
- ``zero0-native``: stage 0 with the library's all-reduce (``zero.reduce_with``); the other stages sum in rank order.
- ``alone``: every rank trains for itself and nothing is communicated; its loss is not comparable.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from launcher.contract.train import GPT as GPTConfig
from launcher.engine import gpt
from launcher.engine.comm import Comm
from launcher.engine.heap import keep_freed
from launcher.engine.zero import ZeroEngine

MICRO_BATCH = 4
SEED = 17
CLIP, LR, BETAS, EPS = 1.0, 3e-4, (0.9, 0.95), 1e-8
BUCKET_BYTES = 25_000_000
SIZES = {
    "tiny": GPTConfig(layers=2, hidden=32, heads=2, seq_len=16),
    "11M": GPTConfig(layers=6, hidden=384, heads=6, seq_len=64),
    "25M": GPTConfig(layers=8, hidden=512, heads=8, seq_len=64),
    "85M": GPTConfig(layers=12, hidden=768, heads=12, seq_len=64),
}


@dataclass(frozen=True)
class Training:
    """``step(tokens)`` is one whole optimizer step on (batch, seq + 1) tokens; its loss, before the update.

    ``comm`` counts what is sent, where the policy counts for itself. ``finish`` waits for what a step leaves under
    way for the next one: it belongs to the time of a turn.
    """

    step: Callable[[Tensor], Tensor]
    comm: Comm | None = None
    finish: Callable[[], None] | None = None


def make_model(size: str) -> gpt.GPT:
    torch.manual_seed(SEED)
    return gpt.GPT(SIZES[size])


def batch(size: str, number: int, rank: int) -> Tensor:
    """Tokens of step ``number``: a sequence that can be learnt, with a tenth of noise; another on every rank."""
    config = SIZES[size]
    chance = torch.Generator().manual_seed(SEED + 1000 * number + rank)
    tokens = torch.randint(config.vocab, (MICRO_BATCH, config.seq_len + 1), generator=chance)
    noisy = torch.rand(MICRO_BATCH, config.seq_len + 1, generator=chance) < 0.1
    for at in range(1, config.seq_len + 1):
        following = (tokens[:, at - 1] * 5 + 7) % config.vocab
        tokens[:, at] = torch.where(noisy[:, at], tokens[:, at], following)
    return tokens


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(tokens[:, :-1], tokens[:, 1:])
    return loss


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)


def _plain(model: nn.Module) -> Training:
    """A loop as everyone writes it: forward, backward, clip, update."""
    optimizer, parameters = _adamw(model), list(model.parameters())

    def step(tokens: Tensor) -> Tensor:
        loss = _loss(model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Training(step)


def _alone(model: gpt.GPT) -> Training:
    return _plain(model)


def _ddp(model: gpt.GPT) -> Training:
    from torch.nn.parallel import DistributedDataParallel

    return _plain(DistributedDataParallel(model, gradient_as_bucket_view=True))


def _fsdp2(reshard: bool) -> Callable[[gpt.GPT], Training]:
    def build(model: gpt.GPT) -> Training:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False)
        return _plain(model)

    return build


def _zero(stage: int, **settings: Any) -> Callable[[gpt.GPT], Training]:
    def build(model: gpt.GPT) -> Training:
        optimizer = {"lr": LR, "betas": BETAS, "eps": EPS, "clip": CLIP}
        zero = {"stage": stage, "bucket_bytes": BUCKET_BYTES, **settings}
        engine = ZeroEngine(model, {"zero": zero, "optimizer": optimizer})

        def step(tokens: Tensor) -> Tensor:
            loss = _loss(engine.model, tokens)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return Training(step, engine.comm, engine.finish_gathering)

    return build


def _trimming(build: Callable[[gpt.GPT], Training]) -> Callable[[gpt.GPT], Training]:
    """The engine leaves alone what a user has said; these are glibc's own values."""

    def chosen(model: gpt.GPT) -> Training:
        os.environ["MALLOC_TRIM_THRESHOLD_"] = "131072"  # read by the engine; glibc reads it at a process's start only
        return build(model)

    return chosen


def _keeping(build: Callable[[gpt.GPT], Training]) -> Callable[[gpt.GPT], Training]:
    def chosen(model: gpt.GPT) -> Training:
        training = build(model)
        if not keep_freed(torch.device("cpu")):
            raise SystemExit("the heap of this process cannot be set")
        return training

    return chosen


def deepspeed_config(stage: int, fair: bool, live: int) -> dict[str, Any]:
    """What DeepSpeed is told; ``fair``: with what the module's table names set. ``live``: elements of two blocks."""
    zero: dict[str, Any] = {"stage": stage}
    if fair:
        elements = BUCKET_BYTES // 4
        zero |= {"reduce_bucket_size": elements, "contiguous_gradients": True, "overlap_comm": False}
        if stage == 3:
            zero |= {
                "stage3_param_persistence_threshold": 0,
                "stage3_max_live_parameters": live,
                "stage3_max_reuse_distance": 0,
                "stage3_prefetch_bucket_size": live // 2,
            }
        else:
            zero |= {"allgather_bucket_size": elements, "use_multi_rank_bucket_allreduce": False}
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_clipping": CLIP,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }


def _deepspeed(stage: int, fair: bool) -> Callable[[gpt.GPT], Training]:
    def build(model: gpt.GPT) -> Training:
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(DS_ACCELERATOR="cpu", RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, LOCAL_SIZE=world)
        import deepspeed  # type: ignore[import-not-found,unused-ignore]

        live = 2 * sum(p.numel() for p in model.blocks[0].parameters())  # the one in use, and the next
        engine, *_ = deepspeed.initialize(
            model=model, optimizer=_adamw(model), config=deepspeed_config(stage, fair, live), dist_init_required=False
        )

        def step(tokens: Tensor) -> Tensor:
            loss = _loss(engine, tokens)
            engine.backward(loss)
            engine.step()
            return loss.detach()

        return Training(step)

    return build


POLICIES: dict[str, Callable[[gpt.GPT], Training]] = {
    **{f"zero{stage}": _zero(stage) for stage in range(4)},
    "zero0-native": _zero(0, reduce_with="native"),
    **{f"zero{stage}-send": _zero(stage, same_host="send") for stage in range(4)},
    **{f"zero{stage}-waits": _zero(stage, overlap_gather=False) for stage in (1, 2)},
    "ddp": _ddp,
    "fsdp2": _fsdp2(True),
    "fsdp2-kept": _fsdp2(False),
    "zero3-trims": _trimming(_zero(3)),
    "fsdp2-heap": _keeping(_fsdp2(True)),
    "alone": _alone,
    **{
        f"deepspeed{stage}-{'set' if fair else 'default'}": _deepspeed(stage, fair)
        for stage in (1, 2, 3)
        for fair in (False, True)
    },
}


def missing(name: str) -> str | None:
    """Why a policy cannot be run here, or None."""
    if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return "deepspeed is not installed"
    return None
