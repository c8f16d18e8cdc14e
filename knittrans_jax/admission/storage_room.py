"""Room in the storage units, in worst-case groups: a group is launched only where its payload is certain to fit.

What it guarantees: the groups that a unit may have to hold never exceed what its budget takes. A group counts from its lease
until the unit has been told to release it and has asked again (which it does only after it has obeyed). A release may be told
twice; units skip what they do not hold.
"""

from __future__ import annotations

import math

from knittrans_jax.admission.state import AdmissionState
from knittrans_jax.config import Config, ConfigError


def check_storage(config: Config, group_bytes: int, look_ahead_groups: int) -> None:
    """Raises `ConfigError` when the budgets could stop the run, and says the smallest that works.

    At most `L` launched groups are of no use to the train batch under way, so a mini-batch can always be formed from
    `L + B / K` groups; a colocated batch must be whole before it begins, and so must one of the policy `train_batch`;
    `proportional` can need as many before it has all of a mini-batch's kinds.
    """
    if config.admission.schedule == "colocated":
        needed, why = config.batch.groups, "batch.groups (a colocated batch begins when it is whole)"
    elif config.admission.policy in ("train_batch", "proportional"):
        needed = look_ahead_groups + config.batch.groups
        why = f"admission.look_ahead_groups and batch.groups, for admission.policy = {config.admission.policy}"
    else:
        needed = look_ahead_groups + config.mini_batch_groups
        why = "admission.look_ahead_groups and one mini-batch"
    hosts = config.rollout.hosts
    room = hosts * (config.rollout.storage_bytes // group_bytes)
    retained = most_retained_groups(config, room)
    if retained:
        smallest = smallest_room_with_retained(config, needed)
        needed += retained
        why += f", and {retained} consumed groups that no checkpoint covers yet (launch.on_child_death)"
    else:
        smallest = needed
    if room >= needed:
        return
    least = -(-smallest // hosts) * group_bytes
    raise ConfigError(
        f"rollout.storage_bytes: {config.rollout.storage_bytes} on each of {hosts} hosts hold "
        f"{hosts * (config.rollout.storage_bytes // group_bytes)} groups of at most {group_bytes} bytes; the run could stop "
        f"with fewer than {needed} ({why}); the smallest budget that works is {least}"
    )


def most_retained_groups(config: Config, room: int) -> int:
    """The most consumed groups that units with room for `room` groups keep until a checkpoint covers them; 0: none are.

    A checkpoint is whole at the latest when the next one begins, so those of two intervals. One is also taken at the end of the
    train batch in which they fill `checkpoint.retained_share` of the room; what does not fit then waits until it is whole.

    Raises:
        ConfigError: training is to recover, and no checkpoints are taken.
    """
    if config.launch.on_child_death != "recover":
        return 0
    if not config.checkpoint.every_train_batches:
        raise ConfigError(
            "checkpoint.every_train_batches: launch.on_child_death = recover goes on from checkpoints, so they must be taken "
            "(value 0)"
        )
    by_interval = 2 * config.checkpoint.every_train_batches * config.batch.groups
    return min(by_interval, math.ceil(config.checkpoint.retained_share * room) + config.batch.groups)


def smallest_room_with_retained(config: Config, needed: int) -> int:
    """The least room in which `needed` groups fit beside those that are kept until a checkpoint covers them."""
    by_interval = needed + 2 * config.checkpoint.every_train_batches * config.batch.groups
    by_share = math.ceil((needed + config.batch.groups) / (1 - config.checkpoint.retained_share))
    return min(by_interval, by_share)


class StorageRoom:
    """See the module's opening. `capacity` is a unit's budget in worst-case groups."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._releasing: dict[str, dict[int, bool]] = {}  # unit -> group -> told
        self._retained: dict[str, set[int]] = {}  # unit -> groups
        self._orphans: dict[str, dict[int, float]] = {}  # host -> group -> until when it is waited for
        self.gone: set[int] = set()
        """Groups that are admitted or retained, though their unit does not hold them any more."""

    def fits(self, host: str, state: AdmissionState) -> bool:
        """Whether the host's unit has room for one more group."""
        unit = state.hosts.get(host, host)
        used = state.open_by_host.get(host, 0) + len(self._releasing.get(unit, ())) + len(self._orphans.get(host, ()))
        return used + len(self._retained.get(unit, ())) < self.capacity

    def retain(self, unit: str, group_id: int) -> None:
        """The unit keeps a consumed group until it is told to release it."""
        self._retained.setdefault(unit, set()).add(group_id)

    def retained(self, unit: str) -> frozenset[int]:
        """The consumed groups that the unit keeps."""
        return frozenset(self._retained.get(unit, ()))

    @property
    def retained_share(self) -> float:
        """Of the fullest unit's budget, in worst-case groups: what consumed groups take that are kept."""
        return max(map(len, self._retained.values()), default=0) / max(1, self.capacity)

    def retaining(self) -> set[str]:
        """Units that keep consumed groups."""
        return {unit for unit, groups in self._retained.items() if groups}

    def forget_releases(self) -> None:
        """What units were to let go: they are asked what they hold, and told anew."""
        self._releasing.clear()

    def release(self, unit: str, group_id: int) -> None:
        """The unit may let a group go."""
        self.gone.discard(group_id)
        self._retained.get(unit, set()).discard(group_id)
        self._releasing.setdefault(unit, {})[group_id] = False

    def orders(self, unit: str) -> tuple[int, ...]:
        """The unit asks: what it was told last time is done; what to let go now."""
        left = {group_id: told for group_id, told in self._releasing.get(unit, {}).items() if not told}
        self._releasing[unit] = dict.fromkeys(left, True)
        return tuple(left)

    def orphan(self, host: str, group_id: int, until_s: float) -> None:
        """A lease expired on a host that is still there: its payload may come until then."""
        self._orphans.setdefault(host, {})[group_id] = until_s

    def settled(self, host: str, group_id: int) -> None:
        """The host reported an expired group after all."""
        self._orphans.get(host, {}).pop(group_id, None)

    def forget_orphans(self, now_s: float) -> None:
        """Expired groups that never came count no more."""
        for host, orphans in self._orphans.items():
            if orphans:
                self._orphans[host] = {group_id: until for group_id, until in orphans.items() if until > now_s}
