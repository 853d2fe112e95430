"""Names of older versions of torch: today's torch with new names removed and old ones added.

`bash scripts/test_versions.sh 2.6.0` runs everything with an old version itself.
"""

from __future__ import annotations

import contextlib
import os
import warnings

from tests.harness.programs import REPOSITORY, run_python


def _make_torch_older() -> list[str]:
    """Replace new names of torch by old ones, and return the removed ones."""
    import builtins
    from types import SimpleNamespace
    from typing import Any

    import torch
    import torch.distributed as dist
    from torch._C import _dynamo
    from torch.distributed import device_mesh

    gone: list[tuple[Any, str]] = []

    def lacks(owner: Any, name: str) -> None:
        gone.append((owner, name))

    several = torch._C._autograd._unsafe_set_version_counter

    def one(tensor: torch.Tensor, version: int) -> None:  # before 2.7
        if not isinstance(tensor, torch.Tensor):
            raise TypeError("incompatible function arguments")
        several((tensor,), (version,))

    with contextlib.suppress(TypeError):  # a version that is this old
        several((), ())
        torch._C._autograd._unsafe_set_version_counter = one
    for name in ("all_gather_single", "reduce_scatter_single"):
        lacks(dist, name)
    lacks(torch.UntypedStorage, "_swap_data_ptr_")
    frames: Any = _dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):
        action, set_strategy = frames._FrameAction, frames.set_code_exec_strategy
        strategy = frames._FrameExecStrategy(action.SKIP, action.DEFAULT)
        frames.skip_code = lambda code: set_strategy(code, strategy)
        lacks(frames, "set_code_exec_strategy")
    mesh: Any = device_mesh.DeviceMesh
    if hasattr(mesh, "_get_root_mesh"):
        root = mesh._get_root_mesh
        device_mesh._mesh_resources = SimpleNamespace(get_root_mesh=root)  # type: ignore[attr-defined]
        lacks(mesh, "_get_root_mesh")
    real = builtins.hasattr

    def there(owner: Any, name: str) -> bool:
        return real(owner, name) and not any(owner is other and name == other_name for other, other_name in gone)

    builtins.hasattr = there  # type: ignore[assignment]
    return [name for _, name in gone]


def main() -> None:
    os.environ["FSDP_FORCE_SHARDED"] = "1"
    gone = _make_torch_older()
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh

    import fsdp
    from fsdp.comm import versions
    from fsdp.wrap import ModuleWrapPolicy

    assert (versions.ALL_GATHER, versions.REDUCE_SCATTER) == ("all_gather_into_tensor", "reduce_scatter_tensor")
    assert not versions.STORAGES_SWAP and versions.set_versions is versions._set_each_version
    warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)  # the old names are deprecated today
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)))

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    assert versions.root_of(mesh["b"]) is mesh
    for use_orig_params in (False, True):
        plain = layers()
        model = fsdp.FullyShardedDataParallel(
            layers(),
            auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
            use_orig_params=use_orig_params,
            device_id="cpu",
        )
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
        for step in range(3):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
            losses = [each(x).square().mean() for each in (plain, model)]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    versions.skip_code(layers.__code__)
    print(*gone)
    dist.destroy_process_group()


def test_the_package_works_with_the_names_of_older_torch_versions() -> None:
    code, printed = run_python("-m", "tests.test_versions", folder=REPOSITORY, warn="error")
    assert code == 0, printed
    assert {"all_gather_single", "reduce_scatter_single", "_swap_data_ptr_"} <= set(printed.split())


if __name__ == "__main__":
    main()
