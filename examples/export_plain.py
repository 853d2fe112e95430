"""From a sharded run to a plain model: whole weights on one rank, or from a checkpoint without any ranks.

    torchrun --standalone --nproc-per-node 2 examples/export_plain.py --to DIRECTORY

Both ways give a state dict with the names and shapes of the plain model, for `load_state_dict` or `torch.save`.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullStateDictConfig, StateDictType
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.checkpoint import load_plain, save
from fsdp.wrap import ModuleWrapPolicy


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)), nn.Linear(16, 4))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train, and write the weights for one process.")
    parser.add_argument("--to", type=Path, required=True, help="the directory for model.pt and the checkpoint")
    directory: Path = parser.parse_args().to
    dist.init_process_group("gloo")
    model = FSDP(make_model(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), device_id="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    # Gathered to rank 0, unit by unit, in host memory; the other ranks get an empty dict.
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(state, directory / "model.pt")

    # Each rank writes the local shards. A large run saves this way, and continues at any number of ranks.
    save(directory / "checkpoints", model, optimizer)
    with torch.no_grad():
        expected = model(torch.ones(1, 16))

    if dist.get_rank() == 0:  # anywhere, later: this needs no process group
        whole = make_model()
        whole.load_state_dict(torch.load(directory / "model.pt"))
        assembled = make_model()
        assembled.load_state_dict(load_plain(directory / "checkpoints").model)
        for name, plain in (("model.pt", whole), ("the sharded checkpoint", assembled)):
            same = torch.equal(plain(torch.ones(1, 16)), expected)
            print(f"a plain model from {name} computes the same, to the last bit: {same}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
