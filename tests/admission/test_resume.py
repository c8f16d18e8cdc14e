"""A run that is interrupted anywhere and resumed from any checkpoint trains on every prompt once an epoch, and adds up."""

import collections
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.accounts import Account
from knittrans_jax.admission.lineage import final_lineage
from knittrans_jax.admission.log import EventLog, LogError, read_log
from knittrans_jax.admission.resume import check_resume, log_to_resume
from knittrans_jax.admission.rules import rules_of
from knittrans_jax.admission.state import fold
from knittrans_jax.config import Config, ConfigError
from knittrans_jax.launch import messages as msg
from knittrans_jax.observe.summary import summarise

from .model import Model, check_every_step, make_config, make_core, make_prompts

EXACT = {"domain": {"a": {"min": 0.5, "max": 0.5}, "b": {"min": 0.5, "max": 0.5}}}
EPOCHS = 2


def finite_config(**changes: object) -> Config:
    """Two epochs; more updates are allowed than they hold."""
    return make_config(train__updates=400, train__epochs=EPOCHS, admission__look_ahead_groups=4, **changes)


def trained(events: list[ev.AnyEvent]) -> dict[int, collections.Counter[str]]:
    """How often each prompt was trained on, by epoch, in the final lineage."""
    leased: dict[int, tuple[int, str]] = {}
    groups: dict[int, list[int]] = {}
    found: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for event in final_lineage(events).events:
        match event:
            case ev.Leased():
                leased[event.group_id] = event.epoch, event.prompt_id
            case ev.Admitted():
                groups[event.plan.plan_id] = [group.group_id for group in event.plan.groups]
            case ev.Consumed():
                for epoch, prompt in map(leased.__getitem__, groups[event.plan_id]):
                    found[epoch][prompt] += 1
            case _:
                pass
    return found


class Life:
    """A run from its first start to its end, with interruptions."""

    def __init__(self, config: Config, prompts: list[tuple[str, dict[str, str]]]) -> None:
        self.config, self.prompts = config, prompts
        self.events: list[ev.AnyEvent] = []
        self.checkpoints: list[tuple[int, int]] = []

    def start(self, seed: int, back: int = 0) -> Model:
        """All roles, anew; training from the newest checkpoint, or from `back` before it."""
        core = make_core(self.config, self.prompts, history=tuple(self.events))
        model = Model(core, seed=seed, after_step=check_every_step)
        kept = self.checkpoints[: len(self.checkpoints) - back] or self.checkpoints[:1]
        model.checkpoints = kept
        for host in model.hosts:
            model.store(host)
        model.hello(*(kept[-1] if kept else (0, -1)))
        return model

    def live(self, seed: int, rounds: int, back: int = 0) -> Model:
        """Starts, lets so much happen, and is interrupted if that was not all."""
        model = self.start(seed, back)
        model.go_on(rounds)
        self.events += model.events
        self.checkpoints = model.checkpoints
        return model


@settings(max_examples=25, deadline=None)
@given(
    cuts=st.lists(st.tuples(st.integers(0, 220), st.integers(0, 1)), max_size=4),
    quotas=st.sampled_from([{}, EXACT]),
    every=st.integers(0, 3),
    publish=st.sampled_from(["update", "train_batch"]),
    seed=st.integers(0, 1000),
)
def test_every_prompt_is_trained_on_once_an_epoch_however_often_a_run_is_interrupted(
    cuts: list[tuple[int, int]], quotas: dict, every: int, publish: str, seed: int
):
    config = finite_config(batch__quotas=quotas, checkpoint__every_train_batches=every, train__publish=publish)
    prompts = make_prompts({"a": 12, "b": 12})
    life = Life(config, prompts)
    for number, (rounds, back) in enumerate(cuts):
        if life.live(seed + number, rounds, back).core.finished:
            break
    model = life.live(seed + 100, 6000) if not life.events or not isinstance(life.events[-1], ev.RunEnded) else None
    assert isinstance(life.events[-1], ev.RunEnded)
    assert life.events[-1].reason == "finished"

    assert trained(life.events) == {epoch: collections.Counter(name for name, _ in prompts) for epoch in range(EPOCHS)}
    lineage = final_lineage(life.events)
    assert [event.update for event in lineage.events if isinstance(event, ev.Consumed)] == list(range(24))
    rules = rules_of(config, [attributes for _, attributes in prompts])
    as_logged = fold(rules, life.events)
    assert as_logged.version == 24
    assert as_logged.accounts.counts[Account.CONSUMED] == 48
    assert summarise(life.events, config).groups == as_logged.accounts.as_dict()
    if model is not None:
        assert model.core.state.accounts.as_dict() == as_logged.accounts.as_dict()
        assert model.core.figures.updates == 24
        assert not any(model.core.controller.remainder().values())


def test_what_fills_no_train_batch_is_left_over_and_the_run_ends_normally():
    config = finite_config(batch__quotas=EXACT)
    life = Life(config, make_prompts({"a": 15, "b": 12}))
    model = life.live(3, 6000)
    assert model.core.finished
    assert model.core.ending == "finished"
    assert model.core.state.version == 24  # 6 train batches of 4 and 4: b has no more
    assert model.core.controller.remainder() == {"a": 6, "b": 0}


def test_a_train_batch_that_the_data_cannot_complete_any_more_is_reported_at_once_and_the_run_ends_normally():
    model = Model(make_core(finite_config(batch__quotas=EXACT), make_prompts({"a": 4, "b": 4})), hosts=1, slots=8)
    model.hello()
    host = model.hosts[0]
    for _ in range(30):
        model.store(host)
        fail = 1 if model.version == 5 and host.running else 0  # in the middle of the second and last train batch
        model.sync(host, finish=0 if fail else 2, fail=fail)
        model.train()
        model.tick()
    assert model.core.ending == "finished"
    assert 4 < model.version < 8
    (short,) = [event for event in model.events if isinstance(event, ev.Starved)]
    assert short.missing >= 1
    assert "the data set ends" in short.reason


def test_a_checkpoint_that_the_log_does_not_know_is_refused():
    life = Life(finite_config(checkpoint__every_train_batches=1), make_prompts({"a": 12, "b": 12}))
    life.live(0, 150)
    assert life.checkpoints
    version, after_plan = life.checkpoints[-1]
    for wrong in ((version, after_plan + 1), (version + 4, after_plan + 4), (version + 1, after_plan + 1)):
        core = make_core(life.config, life.prompts, history=tuple(life.events))
        core.start(1e6)
        hello = msg.TrainHello(process=0, processes=2, session=1, version=wrong[0], after_plan=wrong[1])
        (_, reply) = core.handle(0, hello, 1e6).replies[0]
        assert isinstance(reply, msg.Refused), wrong
        assert f"version {wrong[0]}" in reply.reason


def test_processes_that_restored_different_checkpoints_form_no_group():
    life = Life(finite_config(checkpoint__every_train_batches=1), make_prompts({"a": 12, "b": 12}))
    life.live(0, 260)
    old, new = life.checkpoints
    core = make_core(life.config, life.prompts, history=tuple(life.events))
    core.start(1e6)
    core.handle(0, msg.TrainHello(process=0, processes=2, session=1, version=new[0], after_plan=new[1]), 1e6)
    hello = msg.TrainHello(process=1, processes=2, session=2, version=old[0], after_plan=old[1])
    (_, reply) = core.handle(1, hello, 1e6).replies[0]
    assert isinstance(reply, msg.Refused)
    assert "all must restore the same checkpoint" in reply.reason


def begun_log(folder: Path, config: Config, ended: str | None = None) -> Path:
    life = Life(config, make_prompts({"a": 12, "b": 12}))
    life.live(0, 100)
    events = life.events if ended is None else [*life.events, ev.RunEnded(time_s=1e7, reason=ended)]
    with EventLog(folder / "events.log") as log:
        log.append(events)
    return folder / "events.log"


def test_a_log_is_gone_on_with_after_its_torn_tail(tmp_path: Path):
    path = begun_log(tmp_path, finite_config())
    whole = read_log(path)
    path.write_bytes(path.read_bytes() + b"\x40\x00\x00\x00torn")
    torn = read_log(path)
    assert torn.torn_bytes
    with EventLog(path, resume=torn) as log:
        log.append([ev.RunEnded(time_s=1e8, reason="again")])
    again = read_log(path)
    assert again.torn_bytes == 0
    assert again.events == [*whole.events, ev.RunEnded(time_s=1e8, reason="again")]


@pytest.mark.parametrize("tail", [bytes(8), bytes(100), bytes(4096), b"\x40\0\0\0" + bytes(200)])
def test_a_tail_of_zeros_is_a_torn_one(tail: bytes, tmp_path: Path):
    path = begun_log(tmp_path, finite_config())
    whole = read_log(path)
    path.write_bytes(path.read_bytes() + tail)
    assert read_log(path).events == whole.events
    assert read_log(path).torn_bytes == len(tail)


def test_a_log_that_something_else_writes_is_not_gone_on_with(tmp_path: Path):
    path = begun_log(tmp_path, finite_config())
    read = read_log(path)
    with path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(LogError, match="something else writes it"):
        EventLog(path, resume=read)


def test_only_an_unfinished_run_of_the_same_task_model_batch_and_seed_is_resumed(tmp_path: Path):
    config = finite_config(resume=True)
    assert log_to_resume(config, tmp_path, goes_on=True) is None  # nothing is there: it begins
    begun_log(tmp_path, config)
    assert log_to_resume(config, tmp_path, goes_on=True) is not None
    assert log_to_resume(finite_config(), tmp_path, goes_on=False) is None  # not asked for
    assert (
        log_to_resume(finite_config(resume=True, train__processes=1, train__mesh={"data": 1}), tmp_path, goes_on=True)
        is not None
    )
    with pytest.raises(ConfigError, match=r"batch\.mini_batches: was 4 .* \(value 2\)"):
        log_to_resume(finite_config(resume=True, batch__mini_batches=2), tmp_path, goes_on=True)
    with pytest.raises(ConfigError, match="seed: was 0"):
        log_to_resume(finite_config(resume=True, seed=1), tmp_path, goes_on=True)


def test_a_finished_run_is_resumed_only_for_more(tmp_path: Path):
    config = finite_config(resume=True)
    path = begun_log(tmp_path, config, ended="finished")
    with pytest.raises(ConfigError, match=r"has finished.* raise train\.updates or train\.epochs"):
        log_to_resume(config, tmp_path, goes_on=True)
    further = make_config(train__updates=400, train__epochs=EPOCHS + 1, admission__look_ahead_groups=4, resume=True)
    check_resume(further, read_log(path).events)


@pytest.mark.parametrize(
    ("changed", "key"),
    [
        ({"train__epochs": 1}, r"train\.epochs"),
        ({"admission__staleness_bound": 0}, r"admission\.staleness_bound"),
        ({"train__updates": 4}, r"train\.updates"),
    ],
)
def test_settings_that_the_log_has_gone_beyond_are_refused_by_name(changed: dict, key: str):
    kept = {"train__epochs": EPOCHS, "admission__look_ahead_groups": 4, "checkpoint__every_train_batches": 1}
    life = Life(make_config(train__updates=400, **kept), make_prompts({"a": 12, "b": 12}))
    life.live(3, 500)
    with pytest.raises(ConfigError, match=key):
        check_resume(make_config(**({"train__updates": 400} | kept | changed), resume=True), life.events)


def test_the_last_version_of_finite_data_is_evaluated_once_however_the_end_was_interrupted():
    life = Life(finite_config(checkpoint__every_train_batches=1), make_prompts({"a": 12, "b": 12}))
    life.live(3, 6000)
    while not isinstance(life.events[-1], ev.EvalDone):
        life.events.pop()
    model = life.live(4, 6000)
    assert model.core.finished
    last = model.core.state.version
    asked = [
        prompt
        for event in final_lineage(life.events).events
        if isinstance(event, ev.EvalLeased) and event.version == last
        for prompt in event.prompt_ids
    ]
    assert sorted(asked) == sorted(set(asked))
    assert len(asked) == life.config.eval.final_prompts


def test_updates_evaluations_and_versions_that_were_taken_back_are_not_in_the_final_lineage():
    life = Life(finite_config(checkpoint__every_train_batches=1), make_prompts({"a": 12, "b": 12}))
    life.live(1, 250)
    reached, (version, _) = list(life.events), life.checkpoints[0]
    life.live(2, 6000, back=1)
    lineage = final_lineage(life.events)
    assert [one.version for one in lineage.resumptions] == [version]
    undone = [event for event in reached if isinstance(event, ev.Consumed) and event.update >= version]
    assert lineage.resumptions[0].updates_discarded == len(undone)
    published = [event.version for event in lineage.events if isinstance(event, ev.Published)]
    assert sorted(set(published)) == list(range(25))
    assert published == sorted(published)
    evaluated = {event.version for event in lineage.events if isinstance(event, ev.EvalLeased)}
    assert max(evaluated) == 24


def test_a_group_that_a_training_group_takes_back_is_lost_and_its_prompt_comes_first():
    life = Life(finite_config(checkpoint__every_train_batches=0), make_prompts({"a": 12, "b": 12}))
    before = life.live(5, 200)
    consumed = before.core.state.accounts.counts[Account.CONSUMED]
    assert consumed
    model = life.start(6)
    assert model.core.state.version == 0
    assert model.core.state.accounts.counts[Account.CONSUMED] == 0
    assert model.core.state.accounts.counts[Account.LOST] >= consumed
    first = [event for event in before.events if isinstance(event, ev.Leased)]
    model.sync(model.hosts[0])
    model.store(model.hosts[0])
    model.sync(model.hosts[0])
    again = [event for event in model.events if isinstance(event, ev.Leased)]
    assert {event.prompt_id for event in again} <= {event.prompt_id for event in first}
