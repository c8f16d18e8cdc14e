"""The least staleness that any admission can reach: what a trajectory's own flight costs.

Assume a clairvoyant who knows every latency in advance, has slots without end, no quotas inside a train batch and no waiting in
a queue: each group is launched as late as its flight allows to be there for its mini-batch, and latencies are dealt to the
mini-batches in the best way there is. A group consumed by mini-batch `j` at `t` started no later than `t - pull - latency`, so
its version is at most the newest one published by then. The sum over groups is least for an optimal assignment of latencies to
places, which is solved exactly, over several train batches at once, for the quantiles of the workload's latencies. Groups that
are dropped at completion cost it nothing.

With `publish: train_batch` the trainer may wait `idle_s` in each train batch; all of it before the first mini-batch is best,
since it puts off every mini-batch of the batch. With `publish: update` the bound is given for a trainer that never waits.
"""

from __future__ import annotations

import statistics

import numpy as np
from scipy.optimize import linear_sum_assignment

from knittrans_jax.simulate.workloads import Latency, Pace, Publish, Workload, groups_by_domain

BATCHES = 4
"""Train batches that the assignment is solved over."""


def lower_bound(workload: Workload, pace: Pace, publish: Publish, idle_s: float = 0.0) -> float:
    """Mean architectural staleness in updates below which no admission gets; see the module's opening."""
    counts = groups_by_domain(workload, pace)
    place = np.repeat(np.tile(np.arange(pace.mini_batches), BATCHES), pace.groups // pace.mini_batches)
    due_s = idle_s + place * pace.train_s - pace.pull_s
    latencies = np.concatenate([quantiles(workload.latency[domain], BATCHES * n) for domain, n in counts.items()])
    stale = -newest_version(due_s[:, None] - latencies[None, :], pace, publish, idle_s)
    rows, columns = linear_sum_assignment(stale)
    return float(stale[rows, columns].mean())


def quantiles(latency: Latency, count: int) -> np.ndarray:
    """[count] latencies at the middles of `count` equal parts of the distribution."""
    deviation = statistics.NormalDist()
    return np.exp([latency.mu + latency.sigma * deviation.inv_cdf((i + 0.5) / count) for i in range(count)])


def newest_version(time_s: np.ndarray, pace: Pace, publish: Publish, idle_s: float = 0.0) -> np.ndarray:
    """The newest published version at times since a train batch's boundary, counted from that boundary's version (0)."""
    step_s = pace.ideal_step_s + idle_s
    sent_s = time_s - pace.publish_s
    batch = np.floor(sent_s / step_s + 1e-9)
    if publish == "train_batch":
        return pace.mini_batches * batch
    within = np.floor((sent_s - batch * step_s - idle_s) / pace.train_s + 1e-9)
    return pace.mini_batches * batch + np.clip(within, 0, pace.mini_batches)
