import subprocess
import sys
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from knittrans_jax.config import ConfigError, TaskConfig
from knittrans_jax.rollout.tasks.base import (
    EmulatedToolCall,
    Task,
    Turn,
    max_group_bytes,
    max_image_tokens,
    max_trajectory_tokens,
)
from knittrans_jax.rollout.tasks.digits import load_digits
from knittrans_jax.rollout.tasks.digits_read import DigitsRead
from knittrans_jax.rollout.tasks.grid_lookup import QUESTIONS, GridLookup
from knittrans_jax.rollout.tasks.mixture import EmulatedTool, latencies
from knittrans_jax.rollout.tasks.registry import load_task
from knittrans_jax.rollout.tasks.scoring import partial_credit
from knittrans_jax.rollout.text import ALPHABET, Vocabulary

MY_TASK = Path(__file__).with_name("my_task.py")


@hypothesis.given(st.text(ALPHABET))
def test_text_survives_encoding(text: str):
    vocabulary = Vocabulary()
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert all(5 <= token < vocabulary.size for token in ids)


def test_an_unknown_character_or_id_is_named():
    with pytest.raises(ValueError, match="'é' of 'café'"):
        Vocabulary().encode("café")
    with pytest.raises(ValueError, match=r"token id 48: expected 0\.\.47"):
        Vocabulary().decode([48])
    assert Vocabulary().decode([2, 3, 4, 5]) == "<image_start><image><image_end>0"


def test_the_held_out_digits_are_no_training_digits():
    train, heldout = load_digits("train"), load_digits("heldout")
    assert (len(train.labels_N), len(heldout.labels_N)) == (1400, 397)
    together = {image.tobytes() for image in np.concatenate([train.images_NxHxW, heldout.images_NxHxW])}
    assert len(together) == 1797  # all of them differ, so disjoint positions are disjoint pictures
    assert train.images_NxHxW.max() == 255


def test_a_grid_picture_shows_the_digits_that_its_answers_name():
    task = GridLookup({}, seed=3)
    digits = load_digits("heldout")
    label_of = {image.tobytes(): label for image, label in zip(digits.images_NxHxW, digits.labels_N, strict=True)}
    for prompt in task.prompts("heldout")[:50]:
        grid = task.grid(prompt.prompt_id)
        picture = grid.picture_HxWx1[..., 0]
        cells = [picture[8 * r : 8 * r + 8, 8 * c : 8 * c + 8] for r in (0, 1) for c in (0, 1)]
        seen = [str(label_of[np.ascontiguousarray(cell).tobytes()]) for cell in cells]
        assert len(set(grid.questions)) == 3
        assert prompt.attributes["domain"] == (
            "rows" if any(len(QUESTIONS[q]) == 2 for q in grid.questions) else "cells"
        )
        assert prompt.attributes["difficulty"] == ("distinct" if len(set(seen)) == 4 else "repeated")
        for question in grid.questions:
            assert grid.truth(question) == "".join(seen[cell] for cell in QUESTIONS[question])


def test_a_grid_episode_shows_its_picture_in_every_turn_and_scores_each_answer():
    task = GridLookup({}, seed=0)
    prompt = next(p for p in task.prompts("train") if p.attributes["domain"] == "rows")
    grid = task.grid(prompt.prompt_id)
    episode = task.episode(prompt.prompt_id)
    turn = episode.first()
    for index, question in enumerate(grid.questions):
        assert isinstance(turn, Turn)
        picture, text = turn.parts
        assert text == question
        assert np.array_equal(picture, grid.picture_HxWx1)
        turn = episode.respond(grid.truth(question) if index else "")
    assert turn is None
    outcome = episode.outcome()
    assert (outcome.questions, outcome.exact) == (3, 2)
    assert outcome.reward == pytest.approx(2 / 3)  # an empty answer matches nothing


def test_shares_of_the_domains_are_those_asked_for():
    for share in (0.0, 0.25, 1.0):
        task = GridLookup({"rows_share": share, "train_prompts": 400}, seed=0)
        rows = sum(prompt.attributes["domain"] == "rows" for prompt in task.prompts("train"))
        assert rows == 400 * share


def test_digits_read_asks_for_all_digits_of_its_picture():
    task = DigitsRead({"digits": 5}, seed=1)
    prompt = task.prompts("train")[7]
    episode = task.episode(prompt.prompt_id)
    assert episode.picture_HxWxC.shape == (8, 40, 1)
    assert len(episode.truth) == 5
    assert prompt.attributes["domain"] == ("odd" if int(episode.truth[0]) % 2 else "even")
    episode.first()
    assert episode.respond(episode.truth) is None
    assert episode.outcome().reward == 1.0


def test_digits_may_be_shown_larger_and_in_colour():
    small, large = (DigitsRead({"digits": 2} | options, seed=1) for options in ({}, {"scale": 4, "channels": 3}))
    pictures = [task.episode(small.prompts("train")[3].prompt_id).picture_HxWxC for task in (small, large)]
    assert large.limits.image_shapes == (pictures[1].shape,) == ((32, 64, 3),)
    assert all(
        np.array_equal(pictures[1][i::4, j::4, c], pictures[0][..., 0]) for i in (0, 3) for j in (0, 3) for c in (0, 2)
    )


@pytest.mark.parametrize("options", [{"noise": 40.0}, {"shift": 1.0}])
def test_variation_is_on_training_pictures_only_and_the_same_every_time(options: dict[str, float]):
    clean, noisy, again = (DigitsRead(chosen, seed=1) for chosen in ({}, options, options))
    name = clean.prompts("train")[3].prompt_id
    one, two, three = (task.episode(name) for task in (clean, noisy, again))
    assert one.truth == two.truth
    assert not np.array_equal(one.picture_HxWxC, two.picture_HxWxC)
    assert np.array_equal(two.picture_HxWxC, three.picture_HxWxC)
    heldout = clean.prompts("heldout")[3].prompt_id
    assert np.array_equal(clean.episode(heldout).picture_HxWxC, noisy.episode(heldout).picture_HxWxC)


def test_a_prompt_depends_on_its_id_and_the_seed_alone():
    one, other, reseeded = GridLookup({}, 5), GridLookup({"train_prompts": 10}, 5), GridLookup({}, 6)
    assert np.array_equal(one.grid("train-000003").picture_HxWx1, other.grid("train-000003").picture_HxWx1)
    assert not np.array_equal(one.grid("train-000003").picture_HxWx1, reseeded.grid("train-000003").picture_HxWx1)
    with pytest.raises(KeyError, match=r"train-000010.*train-000000 to train-000009"):
        other.grid("train-000010")


@hypothesis.given(st.text("0123456789", max_size=6), st.text("0123456789", min_size=1, max_size=6))
def test_partial_credit_is_full_for_the_truth_alone(answer: str, truth: str):
    credit = partial_credit(answer, truth)
    assert 0 <= credit <= 1
    assert (credit == 1) == (answer == truth)


def test_partial_credit_counts_positions_halves_long_answers_and_gives_nothing_for_short_ones():
    assert partial_credit("12", "12") == 1
    assert partial_credit("13", "12") == pytest.approx(1 / 2)
    assert partial_credit("123", "12") == pytest.approx(2 / 3 / 2)
    assert partial_credit("1", "12") == 0
    assert partial_credit("", "12") == 0


def test_lengths_and_bytes_follow_from_the_limits():
    limits = GridLookup({}, 0).limits
    assert max_image_tokens(limits, patch_size=4, merge_size=2) == 4
    # per turn: image_start, 4, image_end, "top", and 8 sampled
    assert max_trajectory_tokens(limits, 4, 2, max_answer_tokens=8) == 3 * (6 + 3 + 8)
    assert max_group_bytes(limits, trajectories=2, trajectory_tokens=51) == 2 * (51 * 13 + 3 * 256)
    with pytest.raises(ValueError, match="multiple of 10"):
        max_trajectory_tokens(limits, 5, 2, 8)


def test_built_in_tasks_load_by_name():
    for name in ("digits-read", "grid-lookup"):
        assert isinstance(load_task(TaskConfig(name=name), seed=0), Task)


def test_a_users_task_is_a_class_in_a_file():
    task = load_task(TaskConfig(name=f"{MY_TASK}:Echo", options={"repeat": 2}), seed=0)
    assert [prompt.prompt_id for prompt in task.prompts("train")] == ["train-aa", "train-abab", "train-abcabc"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("grid", {}, r"task\.name: no task 'grid': expected one of digits-read, grid-lookup, mixture, or path"),
        ("nowhere.py:Echo", {}, r"task\.name: 'nowhere\.py:Echo': there is no file .*nowhere\.py"),
        (f"{MY_TASK}:Ekko", {}, r"has no class 'Ekko'; it has .*Echo"),
        (f"{MY_TASK}:NoTask", {}, r"is not a task: it has no sampled_ids, limits, prompts, episode"),
        (f"{MY_TASK}:CannotEnd", {}, r"lack the end token 1"),
        (f"{MY_TASK}:Echo", {"colour": 1}, r"task\.options: .*\['colour'\]"),
        ("grid-lookup", {"rows": 1}, r"task\.options: grid-lookup refuses .*rows"),
        ("digits-read", {"digits": 0}, r"task\.options: digits-read refuses .*digits"),
    ],
)
def test_a_task_that_cannot_be_loaded_says_which_key_is_wrong(name: str, options: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        load_task(TaskConfig(name=name, options=options), seed=0)


def test_a_file_that_fails_on_import_is_a_configuration_error(tmp_path: Path):
    (tmp_path / "broken.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        load_task(TaskConfig(name=f"{tmp_path}/broken.py:Task"), seed=0)


def test_a_task_that_fails_when_it_is_made_is_a_configuration_error(tmp_path: Path):
    (tmp_path / "opens.py").write_text(
        "class Task:\n    def __init__(self, options, seed):\n        open('/no/data')\n"
    )
    with pytest.raises(ConfigError, match=r"task\.name: .*opens.py:Task' fails .* FileNotFoundError: .*/no/data"):
        load_task(TaskConfig(name=f"{tmp_path}/opens.py:Task"), seed=0)


def test_loading_a_task_does_not_load_jax():
    """The scheduler reads prompts and has no JAX."""
    code = (
        "import sys; from knittrans_jax.config import TaskConfig; from knittrans_jax.rollout.tasks.registry import load_task;"
        "load_task(TaskConfig(name='grid-lookup'), 0).prompts('train'); sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


DOMAINS: dict[str, dict[str, object]] = {
    "read": {"task": "digits-read", "options": {"digits": 2, "train_prompts": 20, "heldout_prompts": 8}},
    "look": {"task": "grid-lookup", "options": {"train_prompts": 10, "heldout_prompts": 4}},
    "slow": {
        "task": "grid-lookup",
        "options": {"train_prompts": 10, "heldout_prompts": 4},
        "emulated_tool": {"name": "camera", "mean_s": 2.0, "sigma": 0.7},
    },
}


def mixture(seed: int = 0, domains: dict[str, dict[str, object]] = DOMAINS) -> Task:
    return load_task(TaskConfig(name="mixture", options={"domains": domains}), seed)


def test_a_mixture_has_the_prompts_of_its_domains_and_any_first_held_out_ones_are_a_fair_mix():
    task = mixture()
    assert isinstance(task, Task)
    prompts = task.prompts("train")
    assert {p.prompt_id for p in prompts if p.attributes["domain"] == "read"} == {
        f"read/train-{i:06d}" for i in range(20)
    }
    assert {p.attributes["kind"] for p in prompts} == {"even", "odd", "cells", "rows"}
    for count in (4, 8, 12):
        domains = [prompt.attributes["domain"] for prompt in task.prompts("heldout")[:count]]
        assert [domains.count(name) for name in DOMAINS] == [count // 2, count // 4, count // 4]
    limits = task.limits
    assert (limits.turns, limits.tool_calls, limits.image_shapes) == (3, 2, ((8, 16, 1), (16, 16, 1)))


def test_two_domains_of_one_task_show_different_prompts():
    task = mixture()
    one, other = (task.episode(f"{domain}/train-000001").first().parts[0] for domain in ("look", "slow"))
    assert not np.array_equal(one, other)


def test_an_emulated_tool_delays_later_turns_by_seeded_latencies_and_changes_nothing_else():
    task, again, reseeded = mixture(), mixture(), mixture(seed=1)
    delays: list[list[float]] = []
    for one in (task, again, reseeded):
        found: list[float] = []
        for _ in range(3):  # three members of a group: one prompt, latencies of their own
            episode = one.episode("slow/train-000002")
            assert isinstance(episode.first(), Turn)
            for _ in range(2):
                call = episode.respond("1")
                assert isinstance(call, EmulatedToolCall)
                assert isinstance(call.turn, Turn)
                found.append(call.latency_s)
            assert episode.respond("1") is None
            assert episode.outcome().questions == 3
        assert len(set(found)) == 6
        delays.append(found)
    assert delays[0] == delays[1] != delays[2]
    assert isinstance(task.episode("look/train-000002").respond("1"), Turn), "the other domains do not wait"


def test_the_emulated_latency_has_the_mean_and_the_spread_that_were_asked_for():
    draws = latencies(EmulatedTool(name="t", mean_s=3.0, sigma=0.8), np.random.default_rng(0))
    logs = np.log([next(draws) for _ in range(20_000)])
    assert np.exp(logs).mean() == pytest.approx(3.0, rel=0.03)
    assert logs.std() == pytest.approx(0.8, rel=0.03)


@pytest.mark.parametrize(
    ("domains", "message"),
    [
        ({"a/b": DOMAINS["read"]}, r"has none itself \(value 'a/b'\)"),
        ({"a": {"task": "nowhere"}}, "no task 'nowhere'"),
        ({"a": DOMAINS["read"] | {"emulated_tool": DOMAINS["slow"]["emulated_tool"]}}, "no turn after its first"),
        ({"a": DOMAINS["slow"] | {"emulated_tool": {"name": "t", "mean_s": 1}}}, "sigma"),
        ({"a": DOMAINS["read"], "b": {"task": f"{MY_TASK}:OtherAlphabet"}}, r"domains\.b: .* another vocabulary"),
    ],
)
def test_a_mixture_that_cannot_be_made_says_why(domains: dict[str, dict[str, object]], message: str):
    with pytest.raises(ConfigError, match=message):
        mixture(domains=domains)
    with pytest.raises(KeyError, match="read, look, slow before the '/'"):
        mixture().episode("train-000000")
