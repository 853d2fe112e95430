"""Programs on torch's FSDP1, FSDP2 and DistributedDataParallel that train, save in many ways, and go on training."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import FullOptimStateDictConfig, StateDictType, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from tests.harness.optim_states import quiet

BEFORE, AFTER = 2, 2  # steps before and after the save
ROWS = 12  # of each step, divided among the ranks
# by default the state is offloaded, and on CPU torch's exp_avg gets the values of exp_avg_sq so
FULL_ON_CPU = FullOptimStateDictConfig(offload_to_cpu=False)


class Block(nn.Module):
    """Layers of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class OldModel(nn.Module):
    """A tied parameter, a parameter that may be in another memory order, a buffer, and nested units."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.rand(2, 3, 2, 2).to(memory_format=memory_format))
        self.blocks = nn.ModuleList([Block(), nn.Sequential(Block())])
        self.last = nn.Linear(3, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("shift", torch.tensor([0.5, 1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.arange(24.0, dtype=x.dtype).view(2, 3, 2, 2)
        x = self.first(x) + self.shift * (self.scale * weights).mean()
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def old_model(seed: int = 0, memory_format: torch.memory_format = torch.contiguous_format) -> OldModel:
    torch.manual_seed(seed)
    return OldModel(memory_format).to(torch.float64)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Return the loss of all rows at each step."""
    losses = []
    for step in steps:
        torch.manual_seed(100 + step)
        rows = torch.randn(ROWS, 3, dtype=torch.float64)[dist.get_rank() :: dist.get_world_size()]
        optimizer.zero_grad()
        loss = model(rows).square().mean()
        loss.backward()
        optimizer.step()
        gathered = [0.0] * dist.get_world_size()
        dist.all_gather_object(gathered, loss.item())
        losses.append(sum(gathered) / len(gathered))
    return losses


def old_programs(folder: Path) -> dict[str, list[float]]:
    """Train each program, save below `folder`, go on, and return the losses after the save by name of the directory."""
    losses: dict[str, list[float]] = {}
    for program in (fsdp1, fsdp1_original, fsdp1_strided, fsdp2, ddp):
        model, optimizer, save = program()
        quiet(train, model, optimizer, range(BEFORE))
        names = [quiet(one, folder) for one in save]
        after = quiet(train, model, optimizer, range(BEFORE, BEFORE + AFTER))
        losses |= dict.fromkeys(names, after)
    return losses


Program = tuple[nn.Module, torch.optim.Optimizer, list[Callable[[Path], str]]]


def _directory(folder: Path, name: str) -> Path:
    (folder / name).mkdir(exist_ok=True)
    return folder / name


def _to_rank_files(path: Path, model: Any, optimizer: Any, names: str = "{}_world_size_{}_rank_{}.pt") -> None:
    for kind, state in (("model", model), ("optim", optimizer)):
        torch.save(state, path / names.format(kind, dist.get_world_size(), dist.get_rank()))


def fsdp1_original() -> Program:
    return fsdp1(use_orig_params=True)


def fsdp1_strided() -> Program:
    """Return a program whose parameters are not all row-major, of which torch saves local state alone."""
    model, optimizer, save = fsdp1(memory_format=torch.channels_last)
    return model, optimizer, [one for one in save if one.__name__ == "local"]


def fsdp1(use_orig_params: bool = False, memory_format: torch.memory_format = torch.contiguous_format) -> Program:
    mode = "original" if use_orig_params else "flat" if memory_format is torch.contiguous_format else "channels_last"
    model = TorchFSDP(
        old_model(memory_format=memory_format),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    optimizer = adamw(model)

    def of_model(kind: str) -> Any:
        with TorchFSDP.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"]):
            return model.state_dict()

    def of_optimizer(kind: str) -> Any:
        config = FULL_ON_CPU if kind == "FULL" else None
        with TorchFSDP.state_dict_type(model, StateDictType[f"{kind}_STATE_DICT"], optim_state_dict_config=config):
            return TorchFSDP.optim_state_dict(model, optimizer)

    def full(folder: Path) -> str:
        path, state, optim = _directory(folder, f"fsdp1 {mode}, full"), of_model("FULL"), of_optimizer("FULL")
        if dist.get_rank() == 0:
            torch.save({"model": state, "optimizer": optim, "step": BEFORE}, path / "run.pt")
        return path.name

    def sharded(folder: Path) -> str:
        name = f"fsdp1 {mode}, torch.distributed.checkpoint"
        dcp.save({"model": of_model("SHARDED"), "optim": of_optimizer("SHARDED")}, checkpoint_id=folder / name)
        return name

    def accelerate(folder: Path) -> str:
        path = _directory(folder, f"fsdp1 {mode}, accelerate")
        dcp.save({"model": of_model("SHARDED")}, checkpoint_id=path / "pytorch_model_fsdp_0")
        dcp.save({"optimizer": of_optimizer("SHARDED")}, checkpoint_id=path / "optimizer_0")
        for unread in ("scheduler.bin", "dl_state_dict.bin"):
            torch.save(torch.optim.lr_scheduler.StepLR, path / unread)
        return path.name

    def ranks(folder: Path) -> str:
        path = _directory(folder, f"fsdp1 {mode}, sharded on each rank")
        _to_rank_files(path, of_model("SHARDED"), of_optimizer("SHARDED"), names="{0}-rank{2}.pt")
        return path.name

    def local(folder: Path) -> str:
        path = _directory(folder, f"fsdp1 {mode}, local")
        _to_rank_files(path, of_model("LOCAL"), optimizer.state_dict())
        return path.name

    def verl(folder: Path) -> str:
        path, state = _directory(folder, f"fsdp1 {mode}, verl"), optimizer.state_dict()
        for number in state["param_groups"][0]["params"]:  # verl's offload makes an empty state where a rank has none
            state["state"].setdefault(number, {})
        _to_rank_files(path, of_model("SHARDED"), state)
        torch.save(os.path.join, path / f"extra_state_world_size_{dist.get_world_size()}_rank_{dist.get_rank()}.pt")
        return path.name

    return model, optimizer, [full, sharded, accelerate, ranks, local, verl]


def fsdp2() -> Program:
    model = old_model()
    for block in (model.blocks[0], model.blocks[1][0]):
        fully_shard(block)
    fully_shard(model)
    optimizer = adamw(model)

    def sharded(folder: Path) -> str:
        name = "fsdp2, torch.distributed.checkpoint"
        dcp.save(dict(zip(("model", "optim"), get_state_dict(model, optimizer))), checkpoint_id=folder / name)
        return name

    def verl(folder: Path) -> str:
        path = _directory(folder, "fsdp2, verl")
        _to_rank_files(path, model.state_dict(), optimizer.state_dict())
        return path.name

    return model, optimizer, [sharded, verl]


def ddp() -> Program:
    model = DistributedDataParallel(old_model())
    optimizer = adamw(model)

    def file(folder: Path) -> str:
        path = _directory(folder, "ddp")
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path / "run.pt")
        return path.name

    def two_files(folder: Path) -> str:
        path = _directory(folder, "ddp, two files")
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), path / "model.pt")
            torch.save(optimizer.state_dict(), path / "optim.pt")
        return path.name

    def each_rank(folder: Path) -> str:
        path = _directory(folder, "ddp, each rank")
        _to_rank_files(path, model.state_dict(), optimizer.state_dict())
        return path.name

    return model, optimizer, [file, two_files, each_rank]


def save_old_checkpoints(build: Callable[[], nn.Module]) -> None:
    """Save a model after a step, on DDP and on FSDP1, in the directories that the README names."""
    model = DistributedDataParallel(build())
    optimizer = adamw(model)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if dist.get_rank() == 0:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, _directory(Path(), "ddp") / "run.pt"
        )
    sharded = TorchFSDP(build(), device_id=torch.device("cpu"))
    optimizer = adamw(sharded)
    sharded(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    states: dict[str, Any] = {}
    for kind in ("SHARDED", "LOCAL"):
        with TorchFSDP.state_dict_type(sharded, StateDictType[f"{kind}_STATE_DICT"]):
            states[kind] = sharded.state_dict(), TorchFSDP.optim_state_dict(sharded, optimizer)
    dcp.save(dict(zip(("model", "optim"), states["SHARDED"])), checkpoint_id="fsdp1_dcp")
    _to_rank_files(_directory(Path(), "verl"), states["SHARDED"][0], optimizer.state_dict())
    _to_rank_files(_directory(Path(), "fsdp1_local"), states["LOCAL"][0], optimizer.state_dict())
