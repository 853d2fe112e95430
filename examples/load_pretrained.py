"""A pretrained model from a Hugging Face folder of safetensors, into a model that no process ever holds whole.

    torchrun --standalone --nproc-per-node 2 examples/load_pretrained.py

On the meta device parameters have shapes and no values. Wrapping allocates the shards alone, and `load_safetensors` has
each rank read the byte ranges of its shards from the files.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.export import load_safetensors, save_safetensors
from fsdp.wrap import ModuleWrapPolicy

POLICY = ModuleWrapPolicy({nn.TransformerEncoderLayer})


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), *(nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0) for _ in range(3)))


def empty(module: nn.Module) -> None:
    """Allocate memory for the module's own tensors. A buffer that no file has would have to be computed here."""
    module.to_empty(device="cpu", recurse=False)


def in_files(name: str) -> str:
    """Return the name that a parameter has in the files, where it differs from the model's."""
    return f"model.layers.{name}"


def main() -> None:
    dist.init_process_group("gloo")
    folders: list[str | None] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folders)
    folder = Path(str(folders[0]))

    torch.manual_seed(0)  # the same weights on every rank
    pretrained = FSDP(make_model(), auto_wrap_policy=POLICY, device_id="cpu")  # stands for a downloaded folder
    files = save_safetensors(pretrained, folder, max_shard_size="200kB", rename=in_files)

    with torch.device("meta"):
        model = make_model()
    model = FSDP(model, auto_wrap_policy=POLICY, param_init_fn=empty, device_id="cpu")
    load_safetensors(model, folder, rename=in_files)

    x = torch.randn(5, 2, 32)
    with torch.no_grad():
        same = torch.equal(model(x), pretrained(x))
    held, whole = sum(param.nbytes for param in model.parameters()), sum(path.stat().st_size for path in files)
    dist.barrier()
    if dist.get_rank() == 0:
        print(f"{held:,} bytes on this rank, of {whole:,} in {len(files)} files")
        print(f"the loaded model computes the same, to the last bit: {same}")
        for path in files:
            path.unlink()
        folder.rmdir()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
