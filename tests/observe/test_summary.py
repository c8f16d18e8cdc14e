"""The summary of events made by hand: every figure can be added up on paper."""

import json
from pathlib import Path

import pytest

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.log import EventLog
from knittrans_jax.observe.metrics import RunObserver, observe
from knittrans_jax.observe.summary import summarise, summary_to_dict, token_mean

from .made import config, events, every_copy_encoded


def test_every_figure_adds_up(tmp_path: Path) -> None:
    one = summarise(events(), config(tmp_path))
    assert (one.ended, one.updates, one.train_steps, one.wall_s) == ("finished", 6, 3, 10.0)
    assert one.groups == {
        "leased": 0, "running": 1, "ready": 1, "admitted": 0, "consumed": 6,
        "filtered": 0, "expired": 0, "lost": 0, "failed": 1,
    }  # fmt: skip
    assert sum(one.groups.values()) == one.groups_launched == 9
    assert (one.group_retries, one.episode_retries, one.trajectories, one.prompts) == (1, 3, 12, 8)
    assert one.reward_mean == one.reward_mean_first == 0.5
    assert (one.heldout_exact, one.heldout_questions, one.heldout_version) == (17 / 20, 20, 6)
    assert [(e.version, e.questions, e.exact) for e in one.heldout] == [(4, 10, 5), (6, 20, 17)]
    assert (one.trainer_wait_s.data, one.trainer_wait_s.groups) == (1.5, 3.0)
    counts = one.bytes
    assert (counts.payload_pulled, counts.payload_unique, counts.payload_through_scheduler) == (2400, 2328, 0)
    encoder = one.encoder
    assert (encoder.images_unique, encoder.images_referenced) == (6, 24)
    assert (encoder.patches_encoded, encoder.patches_naive) == (48, 192)
    assert one.tokens_per_s == pytest.approx(120 / 7)
    assert one.sampled_tokens_per_s == pytest.approx(48 / 7)
    assert one.logprob_mismatch == pytest.approx(1e-6)


def test_staleness_is_split_into_its_causes(tmp_path: Path) -> None:
    staleness = summarise(events(), config(tmp_path)).staleness
    assert staleness.unit == "updates"
    assert staleness.trajectories == 12
    assert staleness.gap.mean == pytest.approx(5 / 6)
    assert staleness.gap.mean == staleness.in_flight.mean + staleness.in_queue.mean
    assert staleness.in_queue.max == 0
    assert staleness.worst.max == 1
    assert staleness.architectural.mean == pytest.approx(5 / 6 - 0.5)


def test_compilations_after_the_second_train_step_are_told_by_role(tmp_path: Path) -> None:
    one = summarise(events(), config(tmp_path))
    assert one.compilations == 11 + 4
    assert one.compilations_by_role == {"host0": 4, "train": 11}
    assert one.compilations_after_warmup_by_role == {"host0": 0, "train": 1}
    assert one.compilations_after_warmup == 1


def test_patches_and_bytes_are_what_the_trainer_says(tmp_path: Path) -> None:
    one = summarise(every_copy_encoded(events()), config(tmp_path))
    assert one.encoder.patches_encoded == one.encoder.patches_naive == 192
    assert one.bytes.payload_relayed == 600


def test_a_run_that_came_to_nothing_has_nulls_and_no_made_up_zeros(tmp_path: Path) -> None:
    one = summary_to_dict(summarise([ev.RunStarted(time_s=5.0, config={})], config(tmp_path)))
    for name in ("reward_mean", "heldout_exact", "logprob_mismatch", "tokens_per_s", "compilations_after_warmup"):
        assert one[name] is None
    assert one["wall_s"] == 0


REQUIRED = {
    "updates", "train_steps", "groups", "reward_mean", "heldout_exact", "heldout_questions", "staleness", "trainer_wait_s",
    "bytes", "encoder", "logprob_mismatch", "tokens_per_s", "compilations", "compilations_after_warmup", "wall_s",
}  # fmt: skip


def test_following_a_growing_log_gives_what_reading_it_whole_gives(tmp_path: Path) -> None:
    one = config(tmp_path)
    one.directory.mkdir()
    log_path = one.directory / "events.log"
    with RunObserver(one) as observer:
        assert observer.poll() == []
        updates = []
        with EventLog(log_path, fsync=False) as log:
            for event in events():
                log.append([event])
                updates += observer.poll()
        # A record that is only half written is not taken for an event.
        whole = log_path.read_bytes()
        log_path.write_bytes(whole + b"\x40\x00\x00\x00half")
        assert observer.poll() == []
        summary = observer.finish()
    assert [update.update for update in updates] == [1, 2, 3, 4, 5, 6]
    lines = (one.directory / "metrics.jsonl").read_text()
    written = (one.directory / "summary.json").read_text()
    assert json.loads(written).keys() >= REQUIRED
    assert observe(one) == summary
    assert (one.directory / "metrics.jsonl").read_text() == lines
    assert (one.directory / "summary.json").read_text() == written
    last = json.loads(lines.splitlines()[-1])
    assert (last["update"], last["reward_mean"], last["metrics"]["logprob_mismatch"]) == (6, 0.5, None)
    assert not list(one.directory.glob(".summary*"))


def test_a_mean_over_tokens_weighs_updates_by_their_tokens() -> None:
    metrics = [{"x": 1.0, "n": 1.0}, {"x": 4.0, "n": 2.0}, {"x": float("nan"), "n": 0.0}, {}]
    assert token_mean(metrics, "x", "n") == 3.0
    assert token_mean([], "x", "n") is None
