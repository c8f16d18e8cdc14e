"""Who brings weights from whom: no circles, bounded width, against any order of questions and failures."""

import hypothesis.strategies as st
from hypothesis import given, settings

from knittrans_jax.admission.fan_out import FanOut, WeightsDesk
from knittrans_jax.admission.training import TrainGroup
from knittrans_jax.launch.messages import TrainHello, WeightsFrom, WeightsWanted

QUESTIONS = st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=60)


@settings(deadline=None)
@given(st.integers(1, 3), QUESTIONS)
def test_sources_form_a_tree_of_bounded_width(width: int, questions: list[tuple[int, bool]]) -> None:
    tree, source_of = FanOut(width), dict[str, str | None]()
    retries = 0
    for number, fails in questions:
        host = f"host{number}"
        failed = source_of.get(host) if fails else None
        retries += host in source_of
        source = tree.assign(3, host, failed)
        assert failed is None or source != failed
        source_of[host] = source
        way = [host]
        while (above := source_of[way[-1]]) is not None:
            assert above not in way  # no circle
            way.append(above)
        if source is not None:
            assert sum(other == source for other in source_of.values()) <= width
    assert tree.from_training <= width + retries


def test_without_failures_the_training_group_is_asked_as_often_as_the_width_says() -> None:
    for width in (1, 2, 3):
        tree = FanOut(width)
        sources = [tree.assign(0, f"host{i}") for i in range(13)]
        assert tree.from_training == width
        assert all(sources.count(source) <= width for source in set(sources))
    assert [FanOut(2).assign(0, "a")] == [None]


def test_a_tree_is_as_flat_as_its_width_allows() -> None:
    tree = FanOut(2)
    assert [tree.assign(5, name) for name in "abcdefg"] == [None, None, "a", "a", "b", "b", "c"]


def test_versions_long_gone_are_forgotten_and_served_by_the_training_group_if_at_all() -> None:
    tree = FanOut(1)
    for version in range(10):
        assert tree.assign(version, "a") is None
        assert tree.assign(version, "b") == "a"
    assert tree.assign(2, "b") is None


def test_answers_name_every_training_process_or_one_host() -> None:
    training = TrainGroup(2)
    desk = WeightsDesk(FanOut(1), b"key", lambda unit, peer: f"{unit} for {peer}".encode())
    for process in range(2):
        training.hello(TrainHello(process=process, processes=2, session=process, weights=f"train:{process}"))
    training.incarnation = 4

    def ask(host: str, version: int, over: bool = False) -> WeightsFrom | str:
        return desk.answer(WeightsWanted(host=host, address=f"{host}:1", version=version), training, 7, over)

    assert ask("host0", -1) == WeightsFrom(key=b"key") == ask("host0", 7, over=True)
    first, second = ask("host0", 7), ask("host1", 7)
    assert isinstance(first, WeightsFrom)
    assert isinstance(second, WeightsFrom)
    assert (first.source, first.incarnation) == (None, 4)
    assert first.units == {"train0.weights": "train:0", "train1.weights": "train:1"}
    assert (second.source, second.units) == ("host0", {"host0.weights": "host0:1"})
    assert second.tickets == {"host0.weights": b"host0.weights for host1"}
    refusal = ask("host0", 8)
    assert isinstance(refusal, str)
    assert "newest published is 7" in refusal
