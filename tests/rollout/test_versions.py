from typing import Literal

import hypothesis
import hypothesis.strategies as st

from knittrans_jax.rollout.versions import Flight, decide

Mode = Literal["swap", "trajectory"]
versions = st.integers(0, 6)
maybe = st.none() | versions
flights = st.builds(
    Flight,
    held=maybe,
    published=st.integers(-1, 6),
    evaluating=st.booleans(),
    next_evaluation=maybe,
    trajectories=st.integers(0, 3),
    least=maybe,
)
modes = st.sampled_from(["swap", "trajectory"])


@hypothesis.given(flights, modes)
def test_nothing_is_loaded_under_an_active_evaluation(flight: Flight, mode: Mode):
    decision = decide(flight, mode)
    if flight.held is not None and flight.evaluating:
        assert (decision.load, decision.begin) == (None, True)


@hypothesis.given(flights, modes)
def test_trajectory_mode_loads_only_when_nothing_flies_and_swap_never_below_what_a_group_needs(
    flight: Flight, mode: Mode
):
    decision = decide(flight, mode)
    if flight.held is None or decision.load is None:
        return
    assert decision.load != flight.held
    if mode == "trajectory":
        assert flight.trajectories == 0
    elif flight.trajectories and flight.least is not None:
        assert decision.load >= flight.least


@hypothesis.given(flights, modes)
def test_work_begins_only_when_no_other_version_is_due(flight: Flight, mode: Mode):
    decision = decide(flight, mode)
    assert not (decision.begin and decision.load is not None)
    if decision.begin and not flight.evaluating:
        due = flight.next_evaluation if flight.next_evaluation is not None else max(flight.published, flight.held or 0)
        assert due == flight.held


@hypothesis.given(flights, modes)
def test_an_idle_engine_is_never_stuck(flight: Flight, mode: Mode):
    """With nothing in flight it either loads or may begin, unless there is nothing to load at all."""
    if flight.trajectories or flight.evaluating:
        return
    decision = decide(flight, mode)
    assert decision.begin or decision.load is not None or (flight.held is None and flight.published < 0)


def test_an_evaluation_goes_before_a_newer_version():
    flight = Flight(held=3, published=5, evaluating=False, next_evaluation=4, trajectories=2, least=3)
    assert decide(flight, "swap").load == 4
    assert decide(flight, "trajectory").load is None
