"""The mutations that `mutate.py` tries: each breaks something that the named tests must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """`old` stands exactly once in `file`; `tests` are arguments for pytest that must then fail."""

    file: str
    old: str
    new: str
    why: str
    tests: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.file}: {self.why}"


LAYOUT = ("tests/test_layout.py",)
ACCUMULATION = ("tests/test_accumulation.py",)
AGREEMENT = ("tests/test_agreement.py",)
BACKWARD = ("tests/test_backward.py",)
COMMUNICATION = ("tests/test_communication.py",)
FULL_PARAMS = ("tests/test_full_params.py",)
LIFECYCLE = ("tests/test_lifecycle.py",)
NUMERICS = ("tests/test_reliability_numerics.py",)
PARITY = ("tests/test_parity.py",)
CASTS = ("tests/test_precision_casts.py",)
REDUCE_UNUSED = ("tests/test_reduce_unused.py",)
VALUES = ("tests/test_precision_values.py",)
STAGES = ("tests/test_stages.py",)
STREAMS = ("tests/test_streams.py",)

MUTATIONS = [
    Mutation(
        "fsdp/flat/layout.py",
        "offset=_round_up(numel, param_multiple)",
        "offset=numel",
        "parameters start where the previous one ends, aligned or not",
        LAYOUT,
    ),
    Mutation(
        "fsdp/flat/layout.py",
        "shard_numel=_round_up(-(-numel // world_size), shard_multiple)",
        "shard_numel=_round_up(numel // world_size, shard_multiple)",
        "the shards are too short for a vector that does not divide",
        LAYOUT,
    ),
    Mutation(
        "fsdp/flat/layout.py",
        "end = _clamp(shard_end - param.offset, param.numel)",
        "end = _clamp(shard_end - param.offset, param.numel - 1)",
        "the last element of a parameter belongs to nobody",
        LAYOUT,
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "                self.gather(context)\n"
        "            for handle in self.handles:\n"
        "                handle.wait()\n"
        "        for view in self.views:",
        "                self.gather(context)\n        for view in self.views:",
        "the modules compute before the gather is over",
        COMMUNICATION,
    ),
    Mutation(
        "fsdp/comm/collectives.py",
        "        for work in works:\n            wait_for(work",
        "        for work in works[:0]:\n            wait_for(work",
        "a collective is not waited for",
        COMMUNICATION,
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "            item.pending.wait()\n",
        "            pass\n",
        "a reduction is attached before it is over",
        COMMUNICATION,
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "                handle.wait()  # gathered ahead in vain: whoever writes to the shard "
        "next must not overtake the gather\n",
        "                pass\n",
        "nobody waits for a gather that turned out useless",
        STREAMS,
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "        with self.streams.on_gather_stream():\n            self.streams.wait(updated)\n",
        "        pass\n",
        "gathers do not wait for the optimizer",
        STREAMS,
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "            streams.wait(written)\n",
        "            pass\n",
        "the reduction does not wait for the slots",
        STREAMS,
    ),
    Mutation(
        "fsdp/flat/flat_param.py",
        "            block, last_use = self._free.pop(min(fitting)[1])\n            self._streams.wait(last_use)\n",
        "            block, last_use = self._free.pop(min(fitting)[1])\n",
        "a block is lent while another stream still uses it",
        STREAMS,
    ),
    Mutation(
        "fsdp/flat/flat_param.py",
        "            self._streams.wait(last_use)  # the allocator may hand it out on this stream at once\n"
        "            total -=",
        "            total -=",
        "a block is freed while another stream still uses it",
        STREAMS,
    ),
    Mutation(
        "fsdp/comm/collectives.py",
        "        event, self._event = self._event, None\n        self._streams.wait(event)\n",
        "        self._event = None\n",
        "the compute stream does not wait for a collective",
        STREAMS,
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "        if any(item.source is buffer for item in self._in_flight):  # its last reduction "
        "still reads the slots\n"
        "            self._complete_all_but(0)\n",
        "",
        "slots are overwritten while their last reduction reads them",
        BACKWARD,
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "        stale = [slot for slot, written in zip(target.slots, self._written) if not "
        "written and slot.numel()]\n",
        "        stale = []\n",
        "slots that nobody wrote keep what the memory held",
        NUMERICS,
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "        stale += [target.flat[start:end] for start, end in self.handle.layout.gaps]\n",
        "",
        "the padding of the gradient keeps what the memory held",
        NUMERICS,
    ),
    Mutation(
        "fsdp/flat/flat_param.py",
        "values = torch.zeros(layout.padded_numel,",
        "values = torch.empty(layout.padded_numel,",
        "the padding of the shard is born with what the memory held",
        NUMERICS,
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "        self._written = [False] * len(self._written)\n        accumulator",
        "        accumulator",
        "a slot counts as written by an earlier backward",
        PARITY,
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "                    handle.release(context.gather_pool, last_use)\n",
        "                    pass\n",
        "full buffers are never released",
        STAGES,
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            if self._stays(context) and context.expects_backward:\n",
        "            if context.expects_backward:\n",
        "every unit stays gathered between forward and backward",
        STAGES,
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "        for unit in list(self.gathered if not backward_follows else self.idle):\n"
        "            unit.reshard(self)\n",
        "",
        "what was gathered ahead in vain stays",
        COMMUNICATION,
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "            self._settle_offloaded()\n            self._trim()\n",
        "            self._settle_offloaded()\n",
        "an evaluation leaves memory in the pool",
        STAGES,
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "            if attach:\n                item.finish()\n        self.pool.trim()\n",
        "            if attach:\n                item.finish()\n",
        "the reduce buffers' memory stays after the backward",
        STAGES,
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "            self.give_back(source)\n",
        "            pass\n",
        "a reduce buffer is not given back",
        STAGES,
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "            if self._has_room(unit, unit):\n                return\n            other.reshard(self)\n",
        "            return\n",
        "idle units are not resharded to make room",
        STAGES,
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "        if not call.waiting and call in self._open_calls:\n"
        "            self._open_calls.discard(call)\n"
        "            self._maybe_reshard(self.context or call.context)\n",
        "        self._open_calls.discard(call)\n",
        "a unit stays gathered until the end of the backward",
        STAGES,
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            if call.waiting:\n                self._open_calls.add(call)\n",
        "",
        "a unit is resharded at its last leaf, though a frozen weight is still to be read",
        BACKWARD,
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "        shared = {key: tensor.view_as(tensor) for key, tensor in tensors.items() if tensor in watched}\n",
        "        shared: dict[int, torch.Tensor] = {}\n",
        "an input that units share keeps them all gathered",
        STAGES,
    ),
    Mutation(
        "fsdp/runtime/forward_call.py",
        "        for handle in self._handles:  # a leaf input outlives the graph\n            handle.remove()\n",
        "        pass\n",
        "hooks pile up on an input that is used again",
        LIFECYCLE,
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            elif tensor not in self._hooked_leaves:  #",
        "            elif True:  #",
        "hooks pile up on a parameter that is an output",
        LIFECYCLE,
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            torch.clear_autocast_cache()  # it keeps",
        "            pass  # it keeps",
        "autocast keeps a copy of every unit",
        CASTS,
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            stale = refill and self._generation != context.generation\n",
        "            stale = False\n",
        "a full copy of an earlier forward is trusted",
        BACKWARD,
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "        self.generation += 1\n",
        "",
        "a full copy of an earlier forward counts as fresh",
        BACKWARD,
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "            other.refresh(self)\n",
        "",
        "what the user did to the parameters is not followed",
        BACKWARD,
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            if id(leaf) in self._accumulators\n        }\n",
        "            if id(leaf) in self._accumulators\n        } and self._accumulators\n",
        "after a cast the engine waits for nodes that are gone",
        FULL_PARAMS,
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "            if touched and parked is not None:  # zeroed",
        "            if False:  # zeroed",
        "zeroing an accumulator leaves what it hides",
        ACCUMULATION,
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "                    gradients.open(context.reductions, synchronize=True)\n"
        "        self.finish_gradients(context, at_end=True)\n",
        "                    pass\n        self.finish_gradients(context, at_end=True)\n",
        "an accumulator that the synchronised backward does not reach stays local",
        ACCUMULATION,
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            if not gradients.is_open:  # unused, but not by all: zeros, on every rank alike\n"
        "                gradients.open(context.reductions, synchronize=True)\n",
        "            if not gradients.is_open:\n                continue\n",
        "an unused bucket beside a used one gets no gradient",
        BACKWARD,
    ),
    Mutation(
        "fsdp/comm/collectives.py",
        "            if after != 1:\n                out.div_(after)\n",
        "",
        "gradients are summed, not averaged",
        PARITY,
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "        if self._written[index]:\n            slot.add_(grad)\n        else:\n",
        "        if False:\n            slot.add_(grad)\n        else:\n",
        "the second gradient of a leaf replaces the first",
        BACKWARD,
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "            torch._foreach_add_(present, added)\n",
        "            pass\n",
        "a second backward's gradient is lost",
        ACCUMULATION,
    ),
    Mutation(
        "fsdp/comm/collectives.py",
        "    for piece in pieces[1:]:\n",
        "    for piece in pieces[:0]:\n",
        "the direct exchange forgets the other ranks' pieces",
        PARITY,
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "        if self.failed or self.in_backward:  # the last pass ended in an error\n            self._clear()\n",
        "",
        "a failed pass is not healed by the next forward",
        BACKWARD,
    ),
    Mutation(
        "fsdp/runtime/agreement.py",
        "        if votes[:2].tolist() != [digest, -digest]:\n",
        "        if False:\n",
        "ranks that wrapped different models go on",
        AGREEMENT,
    ),
    Mutation(
        "fsdp/runtime/agreement.py",
        "        elif recorded != event:\n            self._announce(ticket, event)\n",
        "",
        "a rank leaves the recorded order without a word",
        AGREEMENT,
    ),
    Mutation(
        "fsdp/runtime/agreement.py",
        "        if recorded is None or self._detailed:\n            self._ask_all(ticket, event)\n",
        "        if recorded is None or self._detailed:\n            pass\n",
        "nobody is asked in the first step",
        AGREEMENT,
    ),
    Mutation(
        "fsdp/runtime/agreement.py",
        "            if agreement.under_way is what:\n                agreement.end(wait=wait)\n",
        "            agreement.end(wait=wait)\n",
        "a pass ends in groups where it has not begun",
        AGREEMENT,
    ),
    Mutation(
        "fsdp/runtime/agreement.py",
        "            if any(other != by_rank[0] for other in by_rank):\n",
        "            if False:\n",
        "handles that differ at debug level DETAIL go unnoticed",
        AGREEMENT,
    ),
    Mutation(
        "fsdp/runtime/agreement.py",
        "            member.take_part(what, ticket, full_precision=bool(chosen % 2))\n",
        "",
        "a rank that skips a unit stays away from its collectives",
        REDUCE_UNUSED,
    ),
    Mutation(
        "fsdp/runtime/agreement.py",
        "        self._turns.setdefault(number, {}).update(zip(order, turns))\n",
        "",
        "ranks do not learn in which order units run",
        REDUCE_UNUSED,
    ),
    Mutation(
        "fsdp/runtime/agreement.py",
        "        if votes[1:].tolist() != [understood, -understood]:\n",
        "        if False:\n",
        "ranks negotiate about different passes",
        REDUCE_UNUSED,
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "        self._forget_casts()\n        for other in self.units:\n",
        "        for other in self.units:\n",
        "a forward computes with the cast that an earlier one left",
        VALUES,
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "again = context.backward_follows and not self._stays(context)",
        "again = context.backward_follows",
        "units that stay gathered keep a cast of their shard as well",
        CASTS,
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "        if (self._shown or self._expected) and any(handle.casts for handle in self.handles):\n",
        "        if False:\n",
        "a backward that needs both precisions goes on",
        VALUES,
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "        self.compute_in_full_precision(context, full_precision)\n        self.precision.cast_buffers(",
        "        self.compute_in_full_precision(context, full_precision)\n        _ = lambda *_, **__: None; _(",
        "buffers do not follow the precision of the graph",
        VALUES,
    ),
    Mutation(
        "fsdp/flat/flat_param.py",
        "            with torch.inference_mode(False):  # it outlives this forward",
        "            with torch.inference_mode(torch.is_inference_mode_enabled()):  # it outlives this forward",
        "a copy in another dtype is made of inference tensors",
        VALUES,
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "added.append(wide[position])",
        "added.append(fresh[position])",
        "a gradient is rounded before it is added to one of low precision",
        VALUES,
    ),
    Mutation(
        "fsdp/runtime/order.py",
        "        self._recorded, self._current = self._current, []\n",
        "        self._recorded, self._current = self._current or self._recorded, []\n",
        "a pass that gathered nothing is no record",
        CASTS,
    ),
    Mutation(
        "fsdp/runtime/precision.py",
        "        found = (dtype for (owner, name), dtype in self._original_dtypes.items() "
        "if owner._buffers.get(name) is buffer)\n",
        "        found = iter(())\n",
        "the own dtype of a cast buffer is forgotten",
        CASTS,
    ),
]
