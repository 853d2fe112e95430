"""Train a small GPT on real text with sharded parameters, gradients and optimizer state.

The text is the source code of the Python standard library, read as bytes from the local installation, so no download
is needed. One file in ten is held out to measure the loss on text that was not trained on.

    torchrun --standalone --nproc-per-node 2 examples/train_gpt.py

runs on one GPU per process with NCCL, or on the CPU with gloo where there is no GPU. Everything about sharding is the
one call of `FSDP(...)` in `train`; the rest is an ordinary training script. At the end it reports the loss, the memory
of this run next to that of one unsharded process, the traffic of one step, and a sample of text.

With `--save DIRECTORY` it saves a checkpoint at the end, and with `--save-every N` every N steps; `--resume DIRECTORY`
continues from the latest one, at any number of ranks. With the same number of ranks a resumed run has the same
parameters and losses, bit for bit, as a run that never stopped.
"""

import argparse
import copy
import functools
import inspect
import math
import os
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy, Trace, trace
from fsdp.checkpoint import load, save
from fsdp.wrap import ModuleWrapPolicy

VOCABULARY = 256  # the model reads and writes bytes
HELD = ("parameters", "gradients", "optimizer state")
KEPT = 3  # checkpoints that stay
STRATEGIES = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "no_shard": ShardingStrategy.NO_SHARD,
}


# -- the model ---------------------------------------------------------------------------------------------------


def rotate_by_position(x: Tensor) -> Tensor:
    """Apply rotary position encoding (Su et al., 2021) to queries or keys of shape (..., length, features per head)."""
    length, features = x.shape[-2:]
    speeds = 10_000.0 ** (-torch.arange(0, features, 2, device=x.device) / features)
    angles = torch.arange(length, device=x.device)[:, None] * speeds
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Block(nn.Module):
    """One transformer layer: causal self-attention, then a feed-forward network, each with a residual."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width, bias=False)
        self.mix_heads = nn.Linear(width, width, bias=False)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.queries_keys_values(self.attention_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        queries, keys = rotate_by_position(queries), rotate_by_position(keys)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.mix_heads(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """A decoder-only transformer over bytes. The embedding is also the output layer's weight (one shared parameter)."""

    def __init__(self, width: int, depth: int, heads: int):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.final_norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)
        self.apply(self._initialise)
        for block in self.blocks:  # each adds twice to the residual stream, whose variance should not grow with depth
            for layer in (block.mix_heads, block.feed_forward[2]):
                nn.init.normal_(layer.weight, std=0.02 / math.sqrt(2 * depth))
        self.output.weight = self.embedding.weight

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, 256) for int64 `tokens` of shape (batch, length)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(self.final_norm(x))


# -- the text ----------------------------------------------------------------------------------------------------


def read_standard_library() -> tuple[Tensor, Tensor]:
    """Read the standard library's sources as two uint8 vectors: text to train on, and every tenth file, held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped, files = {"test", "tests", "site-packages", "dist-packages"}, list[Path]()
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in skipped]  # and not the files below them
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files.sort()
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for i, path in enumerate(files):
        parts[i % 10 == 9].append(path.read_bytes())
    train, held_out = (bytearray().join(part) for part in parts)
    if min(len(train), len(held_out)) < 100_000:
        raise SystemExit(f"train_gpt.py: too little text: this Python keeps {len(files)} source files under {root}")
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """Return rows of `length` + 1 bytes of `text` from each of `starts`, as int64."""
    return text[starts[:, None] + torch.arange(length + 1)].long()


class Batches:
    """An endless, seeded stream of batches of shape (batch, context + 1); each rank has separate rows of the stream."""

    def __init__(self, text: Tensor, context: int, batch: int, seed: int):
        self.text, self.context, self.batch = text, context, batch
        self.generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> Tensor:
        shape = (dist.get_world_size(), self.batch)
        starts = torch.randint(len(self.text) - self.context, shape, generator=self.generator)
        return windows(self.text, starts[dist.get_rank()], self.context)


# -- training ----------------------------------------------------------------------------------------------------


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats per byte of the next bytes of `batch`, shape (batch, length + 1)."""
    logits = model(batch[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def mean_over_ranks(value: Tensor) -> float:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor, context: int, batch: int, device: torch.device) -> float:
    """Return the mean loss on windows spread evenly over `text`, divided among the ranks."""
    batches = 8
    starts = torch.linspace(0, len(text) - context - 1, batches * batch * dist.get_world_size()).long()
    mine = starts[dist.get_rank() :: dist.get_world_size()].view(batches, batch)
    model.eval()
    losses = [loss_of(model, windows(text, rows, context).to(device)) for rows in mine]
    model.train()
    return mean_over_ranks(torch.stack(losses).mean())


@torch.no_grad()
def sample(model: nn.Module, prompt: bytes, length: int, context: int, seed: int, device: torch.device) -> bytes:
    """Extend `prompt` by `length` sampled bytes. Every rank has to call it: each forward gathers parameters."""
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        logits = model(torch.tensor([text[-context:]], device=device))[0, -1]
        probabilities = torch.softmax(logits.float().cpu() / 0.9, dim=0)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    model.train()
    return bytes(text)


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)


def warm_up_then_cosine(step: int, steps: int) -> float:
    """Return the factor on the learning rate: linear over the first tenth, then half a cosine down to one tenth."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up)))


# -- checkpoints -------------------------------------------------------------------------------------------------


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of this rank's random generators: the CPU's and, where there is one, the accelerator's."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def set_random_states(states: list[Tensor], device: torch.device) -> None:
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


def kind_of_processor(device: torch.device) -> str:
    """Return a name of the processor and of torch; a different kind may round sums differently."""
    cpu = device.type == "cpu"
    name = torch.backends.cpu.get_cpu_capability() if cpu else torch.get_device_module(device).get_device_name(device)
    return f"{name}, torch {torch.__version__}"


@torch.no_grad()
def loss_on_every_rank(model: nn.Module, batch: Tensor) -> float:
    """Return the loss on all of `batch`, computed by every rank alone, on a CPU in one thread.

    The arithmetic does not depend on the number of ranks, so the same parameters give the same number, to the last bit.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model.eval()
    loss = loss_of(model, batch).item()
    model.train()
    torch.set_num_threads(threads)
    return loss


class Checkpoints:
    """The checkpoints of a run, with a held batch and the loss on it.

    The learning rate is not saved: it follows from the step.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches, held: Tensor):
        self.model, self.optimizer, self.batches, self.held = model, optimizer, batches, held

    def save(self, directory: Path, step: int) -> None:
        """Add a checkpoint after `step` steps."""
        extra = {
            "step": step,
            "batches": self.batches.generator.get_state(),
            "random": random_states(self.held.device),
            "held": self.held.cpu(),
            "ranks": dist.get_world_size(),
            "loss": loss_on_every_rank(self.model, self.held),
            "processor": kind_of_processor(self.held.device),
        }
        path = save(directory, self.model, self.optimizer, extra, keep=KEPT)
        if dist.get_rank() == 0:
            print(f"\nsaved {path}, the loss on a held batch is {extra['loss']!r}", flush=True)

    def load(self, path: Path) -> int:
        """Load the latest checkpoint in `path`, or the one at `path`; return the number of steps that were done.

        On the kind of processor that saved it, the loss on the held batch must be the same.
        """
        rank, ranks, device = dist.get_rank(), dist.get_world_size(), self.held.device
        extra = load(path, self.model, self.optimizer)  # the `extra` that this rank has saved
        self.batches.generator.set_state(extra["batches"])
        if extra["ranks"] == ranks:  # otherwise there is no state for each rank: all keep their own
            set_random_states(extra["random"], device)
        loss = loss_on_every_rank(self.model, extra["held"].to(device))
        if rank == 0:
            print(f"step {extra['step']} from {path}, saved by {extra['ranks']} ranks, loaded by {ranks}")
            print(f"the loss on a held batch was {extra['loss']!r} and is {loss!r}", flush=True)
        if loss != extra["loss"] and kind_of_processor(device) == extra["processor"]:
            raise SystemExit("train_gpt.py: the loss on the held batch is not what it was when it was saved")
        return extra["step"]


# -- measuring ---------------------------------------------------------------------------------------------------


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of memory behind `tensors`, counting each storage once."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}.values())


def bytes_held(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
    """Return the bytes that this process holds of each kind in `HELD`."""
    state = [value for per_parameter in optimizer.state.values() for value in per_parameter.values()]
    return [
        storage_bytes(model.parameters()),
        storage_bytes(p.grad for p in model.parameters() if p.grad is not None),
        storage_bytes(value for value in state if isinstance(value, Tensor)),
    ]


def bytes_held_unsharded(model: nn.Module, batch: Tensor) -> list[int]:
    """Return `bytes_held` for a plain copy of `model` after one step of training on `batch`."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model, lr=0.0)
    loss_of(model, batch).backward()
    optimizer.step()
    return bytes_held(model, optimizer)


def bytes_received(name: str, arguments: dict[str, Any]) -> int:
    """Return the bytes that a rank receives in a call of the collective `name`, if none travels twice."""
    if name == "batch_isend_irecv":
        return sum(op.tensor.nbytes for op in arguments["p2p_op_list"] if op.op is dist.irecv)
    if name == "all_reduce":  # a reduce-scatter and an all-gather
        ranks = dist.get_world_size(arguments["group"])
        return 2 * (ranks - 1) * arguments["tensor"].nbytes // ranks
    sizes = sorted(value.nbytes for value in arguments.values() if isinstance(value, Tensor))
    return sizes[1] - sizes[0]  # the whole without one's own shard


class Traffic:
    """A counter of the calls of `torch.distributed`'s collectives on this rank, and of the bytes that it receives."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.received: Counter[str] = Counter()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count while the context is open, by replacing the functions of `torch.distributed`."""
        names = ["all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"]
        names += ["all_reduce", "batch_isend_irecv"]
        originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

        def counted(name: str, call: Callable) -> Callable:
            @functools.wraps(call)
            def wrapper(*args: Any, **kwargs: Any) -> Any:
                bound = inspect.signature(call).bind(*args, **kwargs)
                bound.apply_defaults()
                self.calls[name] += 1
                self.received[name] += bytes_received(name, bound.arguments)
                return call(*args, **kwargs)

            return wrapper

        for name, call in originals.items():
            setattr(dist, name, counted(name, call))
        try:
            yield
        finally:
            for name, call in originals.items():
                setattr(dist, name, call)


def save_trace(recorded: Trace, directory: Path) -> None:
    """Write the recorded step into `directory`, a file of each kind for every rank."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [recorded.save(directory / name) for name in ("trace.json", "step.svg")]
    if recorded.rank == 0:
        print(f"\na step of rank 0, in {paths[0]} (for https://ui.perfetto.dev) and {paths[1]}")
        print(recorded, flush=True)


# -- the script --------------------------------------------------------------------------------------------------


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    def positive(text: str) -> int:
        if int(text) < 1:
            raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
        return int(text)

    parser = argparse.ArgumentParser(
        description="Train a small GPT on the Python standard library's sources.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    steps_help = "training steps in all; a resumed run that has done them does a tenth more"
    parser.add_argument("--steps", type=positive, default=200, help=steps_help)
    parser.add_argument("--strategy", choices=STRATEGIES, default="full_shard", help="what is sharded over the ranks")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the batches and the sample")
    parser.add_argument("--width", type=positive, default=128, help="features per position")
    parser.add_argument("--depth", type=positive, default=4, help="transformer layers")
    parser.add_argument("--heads", type=positive, default=4, help="attention heads per layer")
    parser.add_argument("--context", type=positive, default=64, help="bytes of text that the model sees at once")
    parser.add_argument("--batch", type=positive, default=16, help="sequences per step and rank")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--save", type=Path, metavar="DIRECTORY", help=f"keep the last {KEPT} checkpoints there")
    parser.add_argument("--save-every", type=positive, metavar="N", help="save every N steps, and not at the end alone")
    parser.add_argument("--trace", type=Path, metavar="DIRECTORY", help="draw a step there: trace.json and step.svg")
    parser.add_argument("--resume", type=Path, metavar="DIRECTORY", help="continue from the latest checkpoint there")
    options = parser.parse_args(arguments)
    if options.width % (2 * options.heads):
        parser.error(f"--width {options.width} is not a multiple of twice --heads {options.heads}")
    if options.save_every and not options.save:
        parser.error("--save-every needs --save")
    return options


def accelerator() -> torch.device | None:
    """Return the kind of accelerator through which processes can communicate; None means the CPU."""
    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    return None if dist.get_default_backend_for_device(device) == "gloo" else device


def join_ranks() -> torch.device:
    """Join the process group; return the device of this process: a separate accelerator, or the CPU."""
    if "LOCAL_RANK" not in os.environ:
        raise SystemExit("train_gpt.py: start it with torchrun --standalone --nproc-per-node N examples/train_gpt.py")
    local_rank, local_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    kind = accelerator()
    if kind is None:
        # torchrun gives every process one thread. Share the cores instead; a small model has no use for many.
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, min(8, cores // local_ranks)))
        dist.init_process_group("gloo")
        return torch.device("cpu")
    devices = torch.accelerator.device_count()
    if local_ranks > devices:
        raise SystemExit(f"train_gpt.py: {local_ranks} ranks on this machine need a device each, found {devices}")
    torch.accelerator.set_device_index(local_rank)
    device = torch.device(kind.type, local_rank)
    dist.init_process_group(dist.get_default_backend_for_device(device), device_id=device)
    return device


def main() -> None:
    options = parse_arguments()
    if options.save and not options.resume and (options.save / "latest").exists():
        raise SystemExit(f"train_gpt.py: {options.save} has checkpoints of another run: --resume it, or save elsewhere")
    device = join_ranks()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    strategy = options.strategy if ranks > 1 else "no_shard"  # one rank cannot shard

    train_text, held_out_text = read_standard_library()
    batches = Batches(train_text, options.context, options.batch, options.seed)
    torch.manual_seed(options.seed)  # the same weights on every rank
    model: nn.Module = GPT(options.width, options.depth, options.heads).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    unsharded = bytes_held_unsharded(model, windows(train_text, torch.zeros(1, dtype=torch.long), 8).to(device))

    model = FSDP(model, sharding_strategy=STRATEGIES[strategy], auto_wrap_policy=ModuleWrapPolicy({Block}))
    optimizer = make_optimizer(model, options.lr)
    spread = torch.linspace(0, len(held_out_text) - options.context - 1, 16).long()
    checkpoints = Checkpoints(model, optimizer, batches, windows(held_out_text, spread, options.context).to(device))
    if rank == 0:
        print(f"GPT of {parameters:,} parameters, {ranks} x {device.type} ({dist.get_backend()}), {strategy}")
        print(f"{len(train_text):,} bytes of text to train on, {len(held_out_text):,} held out", flush=True)

    first = checkpoints.load(options.resume) if options.resume else 0
    end = options.steps if first < options.steps else first + max(1, options.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_up_then_cosine(step, end), last_epoch=first - 1
    )
    evaluate = functools.partial(held_out_loss, model, held_out_text, options.context, options.batch, device)
    held_out_start = evaluate()

    traffic, losses = Traffic(), []
    tokens_per_step = ranks * options.batch * options.context
    started = time.perf_counter()
    settings = {"desc": "training", "unit": "step", "mininterval": 0.5}
    bar = tqdm(range(first, end), initial=first, total=end, disable=rank != 0, **settings)
    for step in bar:
        batch = next(batches).to(device)
        last = step == end - 1
        optimizer.zero_grad()
        traced = options.trace and step == max(first, end - 2)
        with traffic.counting() if last else nullcontext(), trace(model) if traced else nullcontext() as recorded:
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
        if traced:
            save_trace(recorded, options.trace)
        schedule.step()
        losses.append(loss.detach())
        if rank == 0 and (step % 10 == 0 or last):  # reading the loss waits for the device: not at every step
            speed = len(losses) * tokens_per_step / (time.perf_counter() - started)
            bar.set_postfix_str(f"loss {loss.item():.3f}, {speed:,.0f} tokens/s", refresh=last)
        if options.save_every and (step + 1) % options.save_every == 0 and not last:
            checkpoints.save(options.save, step + 1)
    seconds = time.perf_counter() - started
    if options.save:
        checkpoints.save(options.save, end)

    held = torch.tensor(bytes_held(model, optimizer), device=device)
    dist.all_reduce(held, dist.ReduceOp.MAX)
    ends = mean_over_ranks(losses[0]), mean_over_ranks(torch.stack(losses[-10:]).mean())
    held_out_end = evaluate()
    text = sample(model, b"def ", 300, options.context, options.seed, device)
    if rank == 0:
        print(f"\n{len(losses)} steps in {seconds:.1f} s, {len(losses) * tokens_per_step / seconds:,.0f} tokens/s")
        print("\nloss, nats per byte                    start           end")
        print(f"  training text (end: mean of {len(losses[-10:]):2d}) {ends[0]:11.3f} {ends[1]:13.3f}")
        print(f"  held-out text                  {held_out_start:11.3f} {held_out_end:13.3f}")
        print_tables(dict(zip(HELD, zip(held.tolist(), unsharded, strict=True), strict=True)), traffic)
        print_sample(text)
    dist.destroy_process_group()


def print_tables(held: dict[str, tuple[int, int]], traffic: Traffic) -> None:
    """Print the bytes held of each kind, per rank and unsharded, and the traffic of a step."""
    print("\nbytes held after a step             per rank     unsharded")
    for name, (mine, plain) in held.items():
        print(f"  {name:28s}{mine:14,}{plain:14,}   {mine / plain:6.1%}")
    print("\none step, as rank 0 sees it            calls   bytes received")
    for name, calls in traffic.calls.items():
        print(f"  {name:28s}{calls:14,}{traffic.received[name]:17,}")
    print(f"  {'total':28s}{sum(traffic.calls.values()):14,}{sum(traffic.received.values()):17,}")


def print_sample(text: bytes) -> None:
    print("\na sample of the trained model")
    printable = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text.decode("utf-8", "replace"))
    print("\n".join(f"  | {line}" for line in printable.split("\n")), flush=True)


if __name__ == "__main__":
    main()
