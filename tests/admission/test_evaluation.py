from knittrans_jax.admission.evaluation import MAX_ATTEMPTS, Evaluations

from .model import make_config

HELD_OUT = [f"h{i}" for i in range(8)]


def evaluations(**changes: object) -> Evaluations:
    return Evaluations(make_config(**changes), HELD_OUT)  # every 4 updates, 3 prompts; 12 updates, then 5


def test_an_evaluation_is_due_every_so_many_updates_also_when_versions_come_in_strides():
    plan = evaluations()
    due = []
    for version in (0, 3, 5, 7, 8, 11):
        plan.published(version, 1)
        if plan.waiting:
            due.append(version)
            plan.waiting.clear()
    assert due == [5, 8]


def test_the_prompts_are_split_over_the_hosts_and_each_has_one_share_at_a_time():
    plan = evaluations()
    plan.published(4, 2)
    first, second = plan.lease("host0", 4, 0.0), plan.lease("host1", 4, 0.0)
    assert first is not None
    assert second is not None
    assert sorted(first.share.prompt_ids + second.share.prompt_ids) == HELD_OUT[:3]
    plan.published(8, 2)
    assert plan.lease("host0", 8, 0.0) is None


def test_shares_that_nobody_began_give_way_to_the_next_evaluation_and_are_counted():
    plan = evaluations()
    plan.published(4, 2)
    plan.lease("host0", 4, 0.0)
    plan.published(8, 2)
    assert (plan.shares_superseded, len(plan.waiting), len(plan.leases)) == (1, 2, 1)


def test_the_last_version_gets_the_final_evaluation_and_only_its_end_is_the_end():
    plan = evaluations()
    assert not plan.finished
    plan.published(12, 1)
    lease = plan.lease("host0", 12, 0.0)
    assert lease is not None
    assert lease.share.prompt_ids == tuple(HELD_OUT[:5])
    assert not plan.finished
    assert plan.done(lease.eval_id) == lease
    assert plan.finished
    assert plan.done(lease.eval_id) is None, "a result counts once"


def test_a_lease_that_runs_out_is_given_out_again_a_bounded_number_of_times():
    plan = evaluations()
    plan.published(12, 1)
    now_s = 0.0
    for _ in range(MAX_ATTEMPTS):
        lease = plan.lease("host0", 12, now_s)
        assert lease is not None
        now_s = lease.deadline_s
        assert plan.expire(now_s - 0.1) == []
        assert plan.expire(now_s) == [lease]
    assert plan.lease("host0", 12, now_s) is None
    assert plan.leases_expired == MAX_ATTEMPTS


def test_without_held_out_prompts_nothing_is_due():
    plan = Evaluations(make_config(), [])
    plan.published(12, 1)
    assert plan.finished


def test_a_share_that_its_host_cannot_run_is_given_out_again_at_once():
    plan = evaluations()
    plan.published(4, 1)
    lease = plan.lease("host0", 4, 0.0)
    assert lease is not None
    assert plan.failed(lease.eval_id) == lease
    assert plan.failed(lease.eval_id) is None, "it had ended"
    again = plan.lease("host0", 5, 0.0)
    assert again is not None
    assert (again.version, again.share.prompt_ids) == (5, lease.share.prompt_ids)
    assert plan.done(lease.eval_id) is None
