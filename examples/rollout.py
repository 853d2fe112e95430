"""Train a policy on two ranks while a third process generates with a plain bf16 copy of it.

    torchrun --standalone --nproc-per-node 2 examples/rollout.py

The copy gets all weights once, unit by unit and already in bf16, and after each step only the elements that the step
has changed. Each rank finds these in the local shards, without communication. In the end the outputs of the copy are
equal to those of the trained weights, to the last bit.
"""

import pickle
import subprocess
import sys
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp.export
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy

STATES, WIDTH, ACTIONS, STEPS = 16, 64, 8, 30


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(STATES, WIDTH), nn.Sequential(Layer(), Layer(), Layer())
        self.head = nn.Linear(WIDTH, ACTIONS)

    def forward(self, states: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(states)))


# -- the process that generates ----------------------------------------------------------------------------------------


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Keep a plain policy, follow the training, and answer with logits."""
    policy, version = Policy().bfloat16(), 0
    weights = policy.state_dict()
    while True:
        kind, value = pickle.load(requests)
        if kind == "weights":
            for name, tensor in value.items():
                weights[name].copy_(tensor)
        elif kind == "changes":
            version = fsdp.export.apply_changes(weights, value, version=version)
        elif kind == "states":
            with torch.no_grad():
                pickle.dump(policy(value), answers)
            answers.flush()
        else:
            return


class Generator:
    """The generating process, as rank 0 sees it."""

    def __init__(self) -> None:
        command = [sys.executable, __file__, "serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def send(self, kind: str, value: Any = None) -> None:
        assert self._process.stdin is not None
        pickle.dump((kind, value), self._process.stdin)
        self._process.stdin.flush()

    def logits(self, states: Tensor) -> Tensor:
        self.send("states", states)
        assert self._process.stdout is not None
        answer: Tensor = pickle.load(self._process.stdout)
        return answer

    def close(self) -> None:
        self.send("end")
        self._process.wait()


# -- the training ------------------------------------------------------------------------------------------------------


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    policy = FSDP(Policy(), auto_wrap_policy=ModuleWrapPolicy({Layer}), use_orig_params=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4)
    generator = Generator() if rank == 0 else None

    sent = {name: tensor.clone() for name, tensor in fsdp.export.weights(policy, dtype=torch.bfloat16, to=0)}
    if generator is not None:
        generator.send("weights", sent)
    snapshot = fsdp.export.snapshot(policy, dtype=torch.bfloat16)

    elements, reward = 0, torch.zeros(())
    for step in range(STEPS):
        torch.manual_seed(step)
        states = torch.randint(STATES, (256,))
        actions = torch.empty(256, dtype=torch.int64)
        if generator is not None:  # the copy acts
            actions = torch.distributions.Categorical(logits=generator.logits(states).float()).sample()
        dist.broadcast(actions, 0)
        rewards = (actions == states % ACTIONS).float()
        reward = rewards.mean()
        mine = slice(rank, None, dist.get_world_size())
        chosen = policy(states[mine]).log_softmax(dim=-1).gather(1, actions[mine, None]).squeeze(1)
        (-(rewards - reward)[mine] * chosen).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

        parts: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(fsdp.export.changes(policy, snapshot), parts if rank == 0 else None)
        if generator is not None:
            elements += sum(change.indices.numel() for part in parts for change in part.tensors)
            generator.send("changes", parts)
        if rank == 0 and (step + 1) % 10 == 0:
            print(f"step {step + 1}: reward {float(reward):.2f}")

    trained = {name: tensor.clone() for name, tensor in fsdp.export.weights(policy, dtype=torch.bfloat16, to=0)}
    if generator is not None:
        plain = Policy().bfloat16()
        plain.load_state_dict(trained)
        states = torch.arange(STATES)
        print(f"outputs equal: {torch.equal(generator.logits(states), plain(states))}")
        share = elements / STEPS / sum(tensor.numel() for tensor in trained.values())
        print(f"sent {share:.0%} of the elements per step")
        generator.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve(sys.stdin.buffer, sys.stdout.buffer)
    else:
        main()
