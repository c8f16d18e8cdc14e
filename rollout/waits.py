"""Episodes that wait for a tool: which call each waits for, which have no slot meanwhile, which are back and need one.

What it guarantees: at most `most_off_slot` trajectories are without a slot (waiting, or back and in line for one); a further
one keeps its slot, so that it can always go on and nobody waits in a circle. Those that are back stand in line in the order
in which they came. A member that is dropped leaves nothing behind. Every wait and its length are counted.
"""

from __future__ import annotations

import collections

from knittrans_jax.rollout.runs import Member
from knittrans_jax.rollout.slots import SlotTable
from knittrans_jax.rollout.tasks.base import EmulatedToolCall, ToolCall
from knittrans_jax.rollout.tools import ToolResult, ToolRunner, ToolTimeout
from knittrans_jax.rollout.turns import EncodedTurn


class ToolWaits:
    """See the module's opening. The engine's thread alone uses it."""

    def __init__(
        self,
        tools: ToolRunner,
        slots: SlotTable,
        calls_per_episode: int,
        most_off_slot: int,
        counters: dict[str, float],
    ) -> None:
        """`calls_per_episode`: the task's `limits.tool_calls`."""
        self._tools, self._slots, self._counters = tools, slots, counters
        self._calls_per_episode, self._most_off_slot = calls_per_episode, most_off_slot
        self._members: dict[int, Member] = {}
        """By number of the call."""
        self._returned: collections.deque[tuple[Member, EncodedTurn]] = collections.deque()

    @property
    def waiting(self) -> int:
        """Episodes that wait for a tool."""
        return len(self._members)

    @property
    def returned(self) -> int:
        """Trajectories that are back and in line for a slot."""
        return len(self._returned)

    @property
    def off_slot(self) -> int:
        """Trajectories in flight that have no slot."""
        return sum(member.slot < 0 for member in self._members.values()) + len(self._returned)

    def start(self, member: Member, call: ToolCall | EmulatedToolCall) -> bool:
        """Starts the call of a member whose answer is over -> whether it left its slot, which is free then.

        Raises:
            ValueError: more calls than the task's limits announce.
        """
        member.tool_calls += 1
        if member.tool_calls > self._calls_per_episode:
            raise ValueError(
                f"tool call {member.tool_calls} ({call.name!r}): the task's limits.tool_calls is {self._calls_per_episode}"
            )
        park = self.off_slot < self._most_off_slot
        member.waits_for = self._tools.start(call)
        self._members[member.waits_for] = member
        if park:
            member.parked = self._slots.park(member.slot)
        else:
            self._slots.hold(member.slot)
            self._counters["tool_waits_in_slot"] += 1
        self._counters["tool_calls"] += 1
        self._counters["tool_calls_emulated"] += isinstance(call, EmulatedToolCall)
        self._count_waiting()
        return park

    def take(self) -> list[tuple[Member, ToolResult]]:
        """The members whose call has ended, and how."""
        if not self._members:
            return []
        ended: list[tuple[Member, ToolResult]] = []
        for result in self._tools.take():
            member = self._members.pop(result.number)
            member.waits_for = None
            self._counters["tool_wait_s"] += result.waited_s
            if result.error is not None:
                self._counters["tool_timeouts" if isinstance(result.error, ToolTimeout) else "tool_failures"] += 1
            ended.append((member, result))
        self._counters["tool_results_late"] = float(self._tools.late_results)
        self._count_waiting()
        return ended

    def length(self, member: Member) -> int:
        """Tokens of a trajectory so far, wherever it is."""
        return int(self._slots.length[member.slot]) if member.parked is None else len(member.parked.tokens_T)

    def line_up(self, member: Member, turn: EncodedTurn) -> None:
        """A member without a slot goes on with this turn as soon as there is one."""
        self._returned.append((member, turn))

    def next(self) -> tuple[Member, EncodedTurn]:
        """Who is first in line."""
        return self._returned.popleft()

    def forget_transcript(self, member: Member) -> None:
        """What the member has parked is not needed any more."""
        if member.parked is not None:
            self._slots.discard(member.parked)
            member.parked = None

    def drop(self, member: Member) -> None:
        """Nothing of the member stays here: neither its call, nor its transcript, nor its place in line."""
        if member.waits_for is not None:
            self._tools.cancel(member.waits_for)
            del self._members[member.waits_for]
            member.waits_for = None
            self._count_waiting()
        self.forget_transcript(member)
        if member.slot < 0 and self._returned:
            self._returned = collections.deque(one for one in self._returned if one[0] is not member)

    def _count_waiting(self) -> None:
        waiting = float(len(self._members))
        self._counters["tool_waiting"] = waiting
        self._counters["tool_waiting_most"] = max(waiting, self._counters["tool_waiting_most"])
