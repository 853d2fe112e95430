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
AGREEMENT = ("tests/test_agreement.py",)
CLIP = ("tests/test_clip.py",)
COMM_HOOKS = ("tests/test_comm_hooks.py",)
GRAD_SCALER = ("tests/test_grad_scaler.py",)
CASTS = ("tests/test_precision_casts.py",)
REDUCE_UNUSED = ("tests/test_reduce_unused.py",)
VALUES = ("tests/test_precision_values.py",)


def _tests(file: str, *names: str) -> tuple[str, ...]:
    """The quickest ones that notice, by name: all mutations together take some minutes."""
    return tuple(f"tests/test_{file}.py::test_{name}" for name in names)


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
        _tests("communication", "nothing_is_read_before_its_wait[mlp-ShardingStrategy.FULL_SHARD-False-native]"),
    ),
    Mutation(
        "fsdp/comm/collectives.py",
        "        for work in works:\n            wait_for(work",
        "        for work in works[:0]:\n            wait_for(work",
        "a collective is not waited for",
        _tests("communication", "nothing_is_read_before_its_wait[mlp-ShardingStrategy.FULL_SHARD-False-native]"),
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "            item.pending.wait()\n",
        "            pass\n",
        "a reduction is attached before it is over",
        _tests("communication", "nothing_is_read_before_its_wait[mlp-ShardingStrategy.FULL_SHARD-False-native]"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "                handle.wait()  # gathered ahead in vain: whoever writes to the shard "
        "next must not overtake the gather\n",
        "                pass\n",
        "nobody waits for a gather that turned out useless",
        _tests("streams", "no_race_and_a_host_that_waits_for_nothing[FULL_SHARD-flat-BACKWARD_POST-1]"),
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "        with self.streams.on_gather_stream():\n            self.streams.wait(updated)\n",
        "        pass\n",
        "gathers do not wait for the optimizer",
        _tests("streams", "no_race_and_a_host_that_waits_for_nothing[FULL_SHARD-flat-BACKWARD_POST-1]"),
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "            streams.wait(written)\n",
        "            pass\n",
        "the reduction does not wait for the slots",
        _tests("streams", "no_race_and_a_host_that_waits_for_nothing[FULL_SHARD-flat-BACKWARD_POST-1]"),
    ),
    Mutation(
        "fsdp/flat/flat_param.py",
        "            block, last_use = self._free.pop(min(fitting)[1])\n            self._streams.wait(last_use)\n",
        "            block, last_use = self._free.pop(min(fitting)[1])\n",
        "a block is lent while another stream still uses it",
        _tests("streams", "no_race_whatever_lends_the_memory"),
    ),
    Mutation(
        "fsdp/flat/flat_param.py",
        "            self._streams.wait(last_use)  # the allocator may hand it out on this stream at once\n"
        "            total -=",
        "            total -=",
        "a block is freed while another stream still uses it",
        _tests("streams", "no_race_whatever_lends_the_memory"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            context.gathers_follow_compute()\n            self.gather(context)\n            for handle",
        "            self.gather(context)\n            for handle",
        "the gather of summoned parameters does not wait for what was written to them",
        _tests("streams", "no_race_and_a_host_that_waits_for_nothing[FULL_SHARD-flat-BACKWARD_POST-1]"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            self.gather(context)\n            for handle in self.handles:\n                handle.wait()\n"
        "        self._shown = True\n",
        "            self.gather(context)\n        self._shown = True\n",
        "parameters are shown before they are gathered",
        _tests("streams", "no_race_and_a_host_that_waits_for_nothing[FULL_SHARD-flat-BACKWARD_POST-1]"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            context.gathers_follow_compute()\n            self.gather(context)\n            self._generation",
        "            self.gather(context)\n            self._generation",
        "a gather by hand does not wait for what was written to the shard",
        _tests("streams", "no_race_and_a_host_that_waits_for_nothing[FULL_SHARD-flat-BACKWARD_POST-1]"),
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "if self.in_backward else unit.policy.forward_prefetch",
        "if self.in_backward else 0",
        "the next unit's gather waits for the compute of this one",
        _tests("streams", "communication_overlaps_with_compute[ShardingStrategy.FULL_SHARD]"),
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "        self._complete_all_but(self.MAX_BUFFERS - 1)\n",
        "",
        "more reduce buffers wait for their reduction than the bound allows",
        _tests("stages", "bytes_at_each_stage[2-ShardingStrategy.FULL_SHARD-True]"),
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "            item.pending.wait()\n            self.give_back(source)\n",
        "            self.give_back(source)\n",
        "a reduce buffer is lent again while its reduction reads it",
        _tests("streams", "no_race_and_a_host_that_waits_for_nothing[FULL_SHARD-flat-BACKWARD_POST-1]"),
    ),
    Mutation(
        "fsdp/comm/collectives.py",
        "        event, self._event = self._event, None\n        self._streams.wait(event)\n",
        "        self._event = None\n",
        "the compute stream does not wait for a collective",
        _tests("streams", "no_race_and_a_host_that_waits_for_nothing[FULL_SHARD-flat-BACKWARD_POST-1]"),
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "        if any(item.source is buffer for item in self._in_flight):  # its last reduction "
        "still reads the slots\n"
        "            self._complete_all_but(0)\n",
        "",
        "slots are overwritten while their last reduction reads them",
        _tests("backward", "structures"),
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "        stale = [slot for slot, written in zip(target.slots, self._written) if not "
        "written and slot.numel()]\n",
        "        stale = []\n",
        "slots that nobody wrote keep what the memory held",
        _tests("reliability_numerics", "r05_nothing_of_poisoned_memory_gets_into_the_training[2-FULL_SHARD]"),
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "        stale += [target.flat[start:end] for start, end in self.handle.layout.gaps]\n",
        "",
        "the padding of the gradient keeps what the memory held",
        _tests("reliability_numerics", "r05_nothing_of_poisoned_memory_gets_into_the_training[2-FULL_SHARD]"),
    ),
    Mutation(
        "fsdp/flat/flat_param.py",
        "values = torch.zeros(layout.padded_numel,",
        "values = torch.empty(layout.padded_numel,",
        "the padding of the shard is born with what the memory held",
        _tests("reliability_numerics", "r05_nothing_of_poisoned_memory_gets_into_the_training[2-FULL_SHARD]"),
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "        self._written = [False] * len(self._written)\n        accumulator",
        "        accumulator",
        "a slot counts as written by an earlier backward",
        _tests("parity", "parity[2r-mlp-sgd-FULL_SHARD-originals-auto]"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "                    handle.release(context.gather_pool, last_use)\n",
        "                    pass\n",
        "full buffers are never released",
        _tests("stages", "bytes_at_each_stage[2-ShardingStrategy.FULL_SHARD-True]"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            if self._stays(context) and context.expects_backward:\n",
        "            if context.expects_backward:\n",
        "every unit stays gathered between forward and backward",
        _tests("stages", "bytes_at_each_stage[2-ShardingStrategy.FULL_SHARD-True]"),
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "list(self.gathered if not backward_follows else self.idle)",
        "list(self.gathered if not backward_follows else [])",
        "what was gathered ahead in vain stays until the backward",
        _tests("communication", "order_that_changes[early exit]"),
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "list(self.gathered if not backward_follows else self.idle)",
        "list(self.idle)",
        "what the strategy keeps stays though no backward will follow",
        _tests("backward", "nothing_is_gathered_after_a_forward_without_gradients"),
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "            self._settle_offloaded()\n            self._trim()\n",
        "            self._settle_offloaded()\n",
        "an evaluation leaves memory in the pool",
        _tests("stages", "bytes_at_each_stage[2-ShardingStrategy.FULL_SHARD-True]"),
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "            if attach:\n                item.finish()\n        self.pool.trim()\n",
        "            if attach:\n                item.finish()\n",
        "the reduce buffers' memory stays after the backward",
        _tests("stages", "bytes_at_each_stage[2-ShardingStrategy.FULL_SHARD-True]"),
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "            self.give_back(source)\n",
        "            pass\n",
        "a reduce buffer is not given back",
        _tests("stages", "bytes_at_each_stage[2-ShardingStrategy.FULL_SHARD-True]"),
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "            if self._has_room(unit, unit):\n                return\n            other.reshard(self)\n",
        "            return\n",
        "idle units are not resharded to make room",
        _tests("stages", "live_units_are_bounded[trained-segment-True]"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "        if not call.waiting and call in self._open_calls:\n"
        "            self._open_calls.discard(call)\n"
        "            self._maybe_reshard(self.context or call.context)\n",
        "        self._open_calls.discard(call)\n",
        "a unit stays gathered until the end of the backward",
        _tests("stages", "live_units_are_bounded[frozen-none-False]"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "        if call.waiting:\n            self._open_calls.add(call)\n",
        "",
        "a unit is resharded at its last leaf, though a frozen weight is still to be read",
        _tests("backward", "freezing_and_unfreezing[0]"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "        shared = {key: tensor.view_as(tensor) for key, tensor in tensors.items() if tensor in watched}\n",
        "        shared: dict[int, torch.Tensor] = {}\n",
        "an input that units share keeps them all gathered",
        _tests("stages", "live_units_with_a_shared_input_are_bounded[adapted-none-False]"),
    ),
    Mutation(
        "fsdp/runtime/forward_call.py",
        "        for handle in self._handles:  # a leaf input outlives the graph\n            handle.remove()\n",
        "        pass\n",
        "hooks pile up on an input that is used again",
        _tests("lifecycle", "a_reused_input_collects_no_hooks[ShardingStrategy.FULL_SHARD-True]"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            if tensor.grad_fn is not None:  # a leaf needs",
        "            if True:  # a leaf needs",
        "hooks pile up on a parameter that is an output",
        _tests("lifecycle", "a_returned_parameter_collects_no_hooks[ShardingStrategy.FULL_SHARD-True]"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            torch.clear_autocast_cache()  # it keeps",
        "            pass  # it keeps",
        "autocast keeps a cast of every unit",
        _tests("backward", "autocast_keeps_no_cast_of_a_unit_that_was_resharded"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "                torch.clear_autocast_cache()  # its casts",
        "                pass  # its casts",
        "autocast keeps the casts of a copy that is gathered again",
        _tests("backward", "no_forward_uses_a_cast_from_before_the_parameters_changed"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            stale = refill and self._generation != context.generation\n",
        "            stale = False\n",
        "a full copy of an earlier forward is trusted",
        _tests("backward", "no_forward_uses_a_copy_from_before_the_parameters_changed"),
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "        self.generation += 1\n",
        "",
        "a full copy of an earlier forward counts as fresh",
        _tests("backward", "no_forward_uses_a_copy_from_before_the_parameters_changed"),
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "            other.refresh(self)\n",
        "",
        "what the user did to the parameters is not followed",
        _tests("backward", "replaced_parameters_are_written_back"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            if id(leaf) in self._accumulators\n        }\n",
        "            if id(leaf) in self._accumulators\n        } and self._accumulators\n",
        "after a cast the engine waits for nodes that are gone",
        _tests("full_params", "casting[double]"),
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "            if touched and parked is not None:  # zeroed",
        "            if False:  # zeroed",
        "zeroing an accumulator leaves what it hides",
        _tests("accumulation", "every_order_of_synchronised_and_unsynchronised_passes[2]"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "                    gradients.open(context.reductions, synchronize=True)\n"
        "        self.finish_gradients(context, at_end=True)\n",
        "                    pass\n        self.finish_gradients(context, at_end=True)\n",
        "an accumulator that the synchronised backward does not reach stays local",
        _tests("accumulation", "units_that_only_some_of_the_passes_use"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            if not gradients.is_open:  # unused, but not by all: zeros, on every rank alike\n"
        "                gradients.open(context.reductions, synchronize=True)\n",
        "            if not gradients.is_open:\n                continue\n",
        "an unused bucket beside a used one gets no gradient",
        _tests("backward", "unused_parameters_get_zeros_and_unused_units_nothing"),
    ),
    Mutation(
        "fsdp/comm/collectives.py",
        "            if after != 1:\n                out.div_(after)\n",
        "",
        "gradients are summed, not averaged",
        _tests("parity", "parity[2r-mlp-sgd-FULL_SHARD-originals-auto]"),
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "        if self._written[index]:\n            slot.add_(grad)\n        else:\n",
        "        if False:\n            slot.add_(grad)\n        else:\n",
        "the second gradient of a leaf replaces the first",
        _tests("backward", "structures"),
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "            torch._foreach_add_(present, added)\n",
        "            pass\n",
        "a second backward's gradient is lost",
        _tests("accumulation", "whether_to_synchronise_is_read_when_the_backward_runs"),
    ),
    Mutation(
        "fsdp/comm/collectives.py",
        "    for piece in pieces[1:]:\n",
        "    for piece in pieces[:0]:\n",
        "the direct exchange forgets the other ranks' pieces",
        _tests("parity", "parity[3r-mlp-sgd-FULL_SHARD-originals-direct]"),
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "        if self.failed or self.in_backward:  # the last pass ended in an error\n            self._clear()\n",
        "",
        "a failed pass is not healed by the next forward",
        _tests("backward", "a_step_after_an_exception_gathers_as_often_as_any_other"),
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "        if self.failed or self.in_backward:  # the last pass ended in an error\n",
        "        if self.failed:\n",
        "a failed backward whose graph task is still there is not healed by the next forward",
        _tests("backward", "a_failed_backward_may_go_away_late"),
    ),
    Mutation(
        "fsdp/runtime/context.py",
        " and context._end_of_backward() is self:",
        ":",
        "a failed backward that goes away late takes the next one with it",
        _tests("backward", "a_failed_backward_may_go_away_late"),
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "            context.reset()  # the backward raised, and no later pass has found out\n",
        "            pass\n",
        "a failed backward is not healed by its end",
        _tests("backward", "a_retry_after_an_exception_is_as_if_it_had_not_happened[0]"),
    ),
    Mutation(
        "fsdp/flat/flat_param.py",
        'it again."""\n        self._cast = None\n',
        'it again."""\n        pass\n',
        "the cast of a shard that has changed since is gathered",
        _tests("precision_casts", "a_shard_is_cast_once_per_forward_with_its_backward"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            for handle in self.handles:\n                handle.wait()\n\n        return wait\n",
        "            pass\n\n        return wait\n",
        "waiting for a gather by hand does not wait",
        _tests("streams", "no_race_and_a_host_that_waits_for_nothing[FULL_SHARD-flat-BACKWARD_POST-1]"),
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "            other.forget_output(self)\n            other.refresh(self)\n",
        "            other.refresh(self)\n",
        "a unit that returned a parameter once stays gathered for good",
        _tests("backward", "outputs_that_are_parameters"),
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "        self.watched.clear()\n",
        "",
        "an input that an earlier forward had is replaced by an alias",
        _tests("lifecycle", "a_reused_input_collects_no_hooks[ShardingStrategy.FULL_SHARD-True]"),
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "            queue.give_back(target)\n\n    # -- inside",
        "            pass\n\n    # -- inside",
        "a failed backward's slots keep their memory",
        _tests("backward", "faults_leave_no_memory_behind"),
    ),
    Mutation(
        "fsdp/runtime/context.py",
        "        self.reductions.drain(attach=False)\n",
        "",
        "the reductions of a failed backward are attached by a later one",
        _tests("backward", "a_retry_after_an_exception_is_as_if_it_had_not_happened[0]"),
    ),
    Mutation(
        "fsdp/runtime/full_params.py",
        "        local = torch.zeros_like(handle.shard, device=handle.device)\n",
        '        local = torch.full_like(handle.shard, float("nan"))\n',
        "a rank without a gradient shows what the memory held",
        _tests("full_params", "with_gradients[2]"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "        context.trim_at_rest()\n\n    def gather_now",
        "\n    def gather_now",
        "memory stays in the pool after parameters were shown",
        _tests("full_params", "unit_by_unit_holds_one_unit[True]"),
    ),
    Mutation(
        "fsdp/runtime/unit.py",
        "            context.idle[self] = Idle.RECOMPUTED\n",
        "            context.idle[self] = Idle.AHEAD\n",
        "a unit that was recomputed stands twice in the order, and the next ones farther away than they are",
        _tests("communication", "a_unit_that_is_recomputed_counts_once_in_the_distance"),
    ),
    Mutation(
        "fsdp/runtime/agreement.py",
        "        if votes[:2].tolist() != [digest, -digest]:\n",
        "        if False:\n",
        "ranks that wrapped different models go on",
        _tests("agreement", "different_layouts"),
    ),
    Mutation(
        "fsdp/runtime/agreement.py",
        "        elif recorded != event:\n            self._announce(ticket, event)\n",
        "",
        "a rank leaves the recorded order without a word",
        _tests("agreement", "another_order"),
    ),
    Mutation(
        "fsdp/runtime/agreement.py",
        "        if recorded is None or self._detailed:\n            self._ask_all(ticket, event)\n",
        "        if recorded is None or self._detailed:\n            pass\n",
        "nobody is asked in the first step",
        _tests("agreement", "registration_order"),
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
        "fsdp/runtime/clip.py",
        "        return part / ranks\n",
        "        return part\n",
        "what every rank has counts as often as there are ranks",
        CLIP,
    ),
    Mutation(
        "fsdp/runtime/clip.py",
        "greatest.isnan().to(norms.dtype)",
        "greatest.new_zeros(())",
        "NaN on another rank becomes infinity",
        CLIP,
    ),
    Mutation(
        "fsdp/flat/views.py",
        "        return [grad[start:end] for grad in super().grad_parts() for start, end in self._runs]\n",
        "        return super().grad_parts()\n",
        "padding is part of the norm and of what is clipped",
        CLIP,
    ),
    Mutation(
        "fsdp/runtime/clip.py",
        "torch._foreach_norm(pieces, p, dtype=torch.float64)",
        "torch._foreach_norm(several, p, dtype=torch.float32)",
        "long vectors are summed in float32 on CPU",
        CLIP,
    ),
    Mutation(
        "fsdp/runtime/clip.py",
        "        if any(gradients.accumulates for gradients in unit.gradients):\n",
        "        if False:\n",
        "gradients that are not reduced are clipped",
        CLIP,
    ),
    Mutation(
        "fsdp/sharded_grad_scaler.py",
        "        if group.size() > 1:\n",
        "        if False:\n",
        "each rank knows of its own infinities alone",
        GRAD_SCALER,
    ),
    Mutation(
        "fsdp/sharded_grad_scaler.py",
        "        super()._check_inf_per_device(optimizer)\n        return self._agree(optimizer)\n",
        "        return super()._check_inf_per_device(optimizer)\n",
        "ranks do not agree where the optimizer unscales by itself",
        GRAD_SCALER,
    ),
    Mutation(
        "fsdp/sharded_grad_scaler.py",
        "            flags = {found_inf.device: found_inf.clone()}\n",
        "            flags: dict[torch.device, torch.Tensor] = {}\n",
        "a rank without gradients has no flag",
        GRAD_SCALER,
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "                    shard[start:end].zero_()\n",
        "                    pass\n",
        "a communication hook's padding stays",
        COMM_HOOKS,
    ),
    Mutation(
        "fsdp/runtime/comm_hook.py",
        "        given = [full.detach()]",
        "        given = [full]",
        "a hook may put other memory in place of the reduce buffer's",
        COMM_HOOKS,
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "                self._target = source  # until",
        "                # until",
        "the reduce buffer keeps its memory when a hook raises",
        COMM_HOOKS,
    ),
    Mutation(
        "fsdp/runtime/reduction.py",
        "        by_hook = self._hook is not None\n",
        "        by_hook = False\n",
        "a hook is not called on one rank",
        COMM_HOOKS,
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
    Mutation(
        "fsdp/checkpoint/ragged.py",
        "    boxes += [((last, *o), (1, *s)) for o, s in _row_major(rest, 0, into_last)]\n",
        "",
        "an interval's last row is left out if it is not whole",
        _tests("ragged", "boxes_of_every_interval_of_a_small_tensor"),
    ),
    Mutation(
        "fsdp/checkpoint/state_dict.py",
        "destination[key] = value.detach().clone() if tied else value.detach()",
        "destination[key] = value.detach()",
        "the names of a tied parameter share one tensor in a full state dict",
        _tests("state_dict", "r41_what_was_saved_stays_and_is_compact"),
    ),
    Mutation(
        "fsdp/checkpoint/state_dict.py",
        'everywhere=not getattr(self.config, "rank0_only", False)',
        "everywhere=True",
        "every rank gathers what rank 0 alone asked for",
        _tests("state_dict", "one_gather_per_unit_and_none_where_nothing_need_move"),
    ),
    Mutation(
        "fsdp/checkpoint/state_dict.py",
        "dtype=self.unit.precision.original_dtype(buffer)",
        "dtype=buffer.dtype",
        "buffers are saved in the dtype of the mixed precision",
        _tests("state_dict", "options_count_under_every_strategy_and_for_roots_without_parameters"),
    ),
    Mutation(
        "fsdp/checkpoint/loading.py",
        "if words or elsewhere is not None:",
        "if words:",
        "a rank loads although another one cannot",
        _tests("state_dict", "r43_what_does_not_fit_is_told_on_every_rank_and_nothing_is_loaded"),
    ),
    Mutation(
        "fsdp/checkpoint/loading.py",
        "                self._rest.undo()\n                if not words:",
        "                if not words:",
        "buffers keep what a refused state dict had for them",
        _tests("state_dict", "r43_what_does_not_fit_is_told_on_every_rank_and_nothing_is_loaded"),
    ),
    Mutation(
        "fsdp/checkpoint/load_state_dict.py",
        "handle.shard[place].copy_(received[place])",
        "handle.shard.copy_(received)",
        "what is not in rank 0's state dict is overwritten",
        _tests("state_dict", "what_only_rank_0_has_is_handed_out"),
    ),
    Mutation(
        "fsdp/checkpoint/dcp.py",
        "except Exception as caught:",
        "except (RuntimeError, ValueError) as caught:",
        "the ranks wait for a rank 0 that has raised",
        _tests("dcp", "options_and_several_optimizers"),
    ),
    Mutation(
        "fsdp/checkpoint/dcp.py",
        'f"{path}." if path else ""',
        'f"{path}."',
        "the outermost submodule has nothing",
        _tests("compat", "options_frozen_tied_and_mixed_parameters"),
    ),
    Mutation(
        "fsdp/checkpoint/dcp.py",
        "of) if patched else method",
        "of) if False else method",
        "what torch has patched into a model calls itself",
        _tests("compat", "parents_several_optimizers_patched_models_and_named_optimizers"),
    ),
    Mutation(
        "fsdp/checkpoint/methods.py",
        "if theirs and frame",
        "if False and frame",
        "torch's functions take this rank's parts for whole states",
        _tests("compat", "without_it_nothing_is_silently_wrong"),
    ),
    Mutation(
        "fsdp/compat.py",
        "{clean_path(key): v for",
        "{key: v for",
        "what is loaded by submodule has no parameter's name",
        _tests("compat", "options_frozen_tied_and_mixed_parameters"),
    ),
    Mutation(
        "fsdp/compat.py",
        "return _IncompatibleKeys([], [])",
        "pass",
        "the model's state is missed where only the optimizer's is loaded",
        _tests("compat", "options_frozen_tied_and_mixed_parameters"),
    ),
    Mutation(
        "fsdp/compat.py",
        "(rest[-1].handle_model or rest[-1].broadcast_from_rank0)",
        "rest[-1].handle_model",
        "rank 0 hands out a model's state, and nobody takes it",
        _tests("compat", "torchs_functions_give_and_take_what_they_do_for_torchs_fsdp"),
    ),
    Mutation(
        "fsdp/runtime/agreement.py",
        'words["gave up"] or (-1, 0)',
        'words["gave up"] or (0, 0)',
        "a slow collective before the first pass is taken for a pass that was given up",
        _tests("agreement", "late_rank_before_the_first_pass"),
    ),
]
