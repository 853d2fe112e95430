"""A model that fits no single process: made on the meta device, wrapped, and loaded from a file that rank 0 reads.

    torchrun --standalone --nproc-per-node 2 examples/meta_init.py

On the meta device parameters have shapes and no values. Each unit allocates memory for the shards. `param_init_fn`
initializes one module at a time. Here the values are loaded afterwards: rank 0 has the plain state dict, and sends each
rank the local shards.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullStateDictConfig, StateDictType
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), *(nn.TransformerEncoderLayer(64, 4, 128) for _ in range(3)))


def empty(module: nn.Module) -> None:
    """Allocate memory for the module's own parameters; the values are loaded later."""
    module.to_empty(device="cpu", recurse=False)


def main() -> None:
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as directory:
        pretrained = Path(directory, "model.pt")
        if dist.get_rank() == 0:  # stands for a downloaded file
            torch.save(make_model().state_dict(), pretrained)

        with torch.device("meta"):
            model = make_model()
        policy = ModuleWrapPolicy({nn.TransformerEncoderLayer})
        model = FSDP(model, auto_wrap_policy=policy, param_init_fn=empty, device_id="cpu")
        state = torch.load(pretrained, mmap=True) if dist.get_rank() == 0 else {}
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
            model.load_state_dict(state)
        del state

    expected = make_model().state_dict()
    with FSDP.summon_full_params(model, writeback=False):
        found = {name.replace("_fsdp_wrapped_module.", ""): param for name, param in model.named_parameters()}
        same = all(torch.equal(found[name], value) for name, value in expected.items())
    held = sum(param.nbytes for param in model.parameters())
    if dist.get_rank() == 0:
        whole = sum(value.nbytes for value in expected.values())
        print(f"{held:,} of {whole:,} bytes on this rank; all ranks have the values of the file: {same}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
