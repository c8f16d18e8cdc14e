"""The report and the trace of events made by hand: whole without a network, in bounds, and true to the figures."""

import html.parser
import json
import math
import re
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knittrans_jax.admission import events as ev
from knittrans_jax.admission.accounts import Account
from knittrans_jax.admission.log import EventLog
from knittrans_jax.cli import DONE, WRONG_USE, main
from knittrans_jax.config import config_to_yaml
from knittrans_jax.observe import charts
from knittrans_jax.observe.charts import Axis, Series, number, ticks
from knittrans_jax.observe.compare import Run, comparison, figures_of
from knittrans_jax.observe.history import RunHistory, history_of
from knittrans_jax.observe.lives import Lives
from knittrans_jax.observe.report import report
from knittrans_jax.observe.series import by_train_step, wilson
from knittrans_jax.observe.summary import summary_of
from knittrans_jax.observe.trace import lanes, trace

from .made import K, config, consumed, events, every_copy_encoded, group, lease, plan

VOID = {"meta", "link", "br", "path", "rect", "circle"}


class Page(html.parser.HTMLParser):
    """Checks that tags are balanced; collects text and what would be fetched."""

    def __init__(self, page: bytes) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.tags: set[str] = set()
        self.words = ""
        self.feed(page.decode())
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.fetched += [
            value or "" for name, value in attrs if name in ("src", "href", "data", "action", "xlink:href")
        ]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data + " "


def history(tmp_path: Path, log: list[ev.AnyEvent] | None = None) -> RunHistory:
    return history_of(config(tmp_path), events() if log is None else log)


def report_of(one: RunHistory, ended: str | None = None) -> bytes:
    return report(one, summary_of(one.record, ended))


def test_the_report_needs_nothing_else_and_shows_every_subject(tmp_path: Path) -> None:
    page = report_of(history(tmp_path))
    read = Page(page)
    assert read.fetched == ["data:,"]
    assert "script" not in read.tags
    assert not re.search(rb"url\(|@import|https?://", page)
    for heading in (
        "Learning",
        "Staleness, by cause",
        "Accounts of groups",
        "Composition",
        "trainer waited",
        "Time line",
    ):
        assert heading in read.words
    for figure in ("85.0%", "They add up: 9 groups", "in flight", "Compilations", "finished"):
        assert figure in read.words
    assert report_of(history(tmp_path)) == page
    # 388 payload bytes, of which the image 128; naive: each of 2 trajectories shows it twice, as float32
    assert history(tmp_path).updates[0].payload_naive == 388 - 128 + 4 * 128 * 4


@pytest.mark.parametrize("count", [0, 1, 4, 9, 14, 20])
def test_a_run_that_ended_early_has_a_report_and_a_trace_that_say_so(tmp_path: Path, count: int) -> None:
    one = history(tmp_path, events()[:count])
    read = Page(report_of(one, "error: train0 died <&>"))
    assert "error: train0 died <&>" in read.words
    assert json.loads(trace(one))["otherData"]["groups_left_out"] == 0


def test_a_train_step_that_the_end_cut_short_does_not_stand_beside_whole_ones(tmp_path: Path) -> None:
    updates = history(tmp_path).updates
    assert [[one.update for one in step] for step in by_train_step(updates[:5], K)] == [[1, 2], [3, 4]]
    assert [[one.update for one in step] for step in by_train_step(updates[:1], K)] == [[1]]
    assert by_train_step([], K) == []


def test_what_is_compiled_late_is_a_warning_that_names_the_program_and_the_shape(tmp_path: Path) -> None:
    log = events()
    late = next(i for i, one in enumerate(log) if isinstance(one, ev.Consumed) and one.update == 5)
    program = "accumulate: argument 3 int32[4,68], was int32[2,68]"
    log[late] = msgspec.structs.replace(log[late], compiled=(program,))
    one = history(tmp_path, log)
    assert [(r.role, r.update, r.program) for r in one.record.recompilations] == [("train", 6, program)]
    assert program in Page(report_of(one)).words


def test_a_process_started_anew_warms_up_anew(tmp_path: Path) -> None:
    log = events()
    formed = ev.TrainGroupFormed(time_s=6.5, incarnation=1, processes=1, version=4, after_plan=3, evaluated=4)
    at = next(i for i, one in enumerate(log) if isinstance(one, ev.Consumed) and one.update == 4)
    one = history(tmp_path, [*log[: at - 1], formed, *log[at - 1 :]])
    assert one.record.compilations["train"].after_warmup == 0
    assert not one.record.warm


def test_tools_and_what_roles_counted_are_shown(tmp_path: Path) -> None:
    counted = {"tool_calls": 12.0, "tool_calls_emulated": 12.0, "tool_wait_s": 3.5, "odd_counter": 7.0}
    one = history(
        tmp_path, [*events()[:-1], ev.RoleReport(time_s=9.9, role="rollout-host9", counters=counted), events()[-1]]
    )
    words = Page(report_of(one)).words
    assert "of which emulated: no tool was called" in words
    assert "rollout-host9: odd_counter" in words
    assert "Episodes that waited for tools" not in Page(report_of(history(tmp_path))).words


# --- trace -----------------------------------------------------------------------------------------------------------------


def slices_by_track(body: dict) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    tracks = defaultdict(list)
    for event in body["traceEvents"]:
        assert event["ph"] in "XMCi"
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
    return tracks


def test_the_traces_slices_nest_and_follow_the_lives(tmp_path: Path) -> None:
    body = json.loads(trace(history(tmp_path)))
    tracks = slices_by_track(body)
    for slices in tracks.values():
        stack: list[int] = []
        for begin, end, _ in sorted(slices, key=lambda s: (s[0], -s[1])):
            while stack and stack[-1] <= begin:
                stack.pop()
            assert not stack or end <= stack[-1]
            stack.append(end)
    names = {event["args"]["name"] for event in body["traceEvents"] if event["name"] == "process_name"}
    assert {"trainer", "evaluations"} <= names
    assert {"trajectories on host0 (of all 9 groups)"} <= names
    flat = {name: (begin, end) for slices in tracks.values() for begin, end, name in slices}
    assert flat["group 6"] == (1_000_000, 8_000_000)
    assert flat["update 6"][1] == 8_000_000
    assert sum(name == "running" for slices in tracks.values() for *_, name in slices) == 8
    assert len([e for e in body["traceEvents"] if e["ph"] == "i"]) == 7


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=40))
def test_spans_of_one_lane_do_not_overlap_and_no_lane_is_wasted(raw: list[tuple[int, int]]) -> None:
    spans = [(float(begin), float(begin + length)) for begin, length in raw]
    chosen = lanes(spans)
    for i, (begin, end) in enumerate(spans):
        for j in range(i):
            if chosen[i] == chosen[j]:
                assert end <= spans[j][0] or spans[j][1] <= begin or min(end - begin, spans[j][1] - spans[j][0]) == 0
    busiest = max((sum(b <= at <= e for b, e in spans) for at, _ in spans), default=0)
    assert max(chosen, default=0) <= busiest


@given(st.lists(st.integers(1, 12), min_size=1, max_size=60), st.integers(60, 400))
def test_lives_stay_in_bounds_and_count_what_they_leave_out(groups_by_step: list[int], max_slices: int) -> None:
    one = config(Path("runs"))
    lives, group_id = Lives(one, max_slices), 0
    for step, count in enumerate(groups_by_step):
        for _ in range(count):
            lives.apply(lease(group_id, f"p{group_id}"))
            group_id += 1
        lives.apply(consumed(K * (step + 1) - 1, 1.0, 0))
    newest = list(range(len(groups_by_step)))[-2:]
    assert lives.kept == sum(map(len, lives.by_step.values()))
    assert lives.kept + lives.left_out == lives.groups == sum(groups_by_step)
    assert {0, *newest} <= set(lives.by_step)
    assert lives.kept <= max(max_slices // 6, 4)
    assert all(step % lives.stride == 0 or step in newest for step in lives.by_step)
    assert lives.train_steps == len(groups_by_step)


def test_a_life_has_every_phase_that_it_reached(tmp_path: Path) -> None:
    by_id = {life.group_id: life for kept in history(tmp_path).lives.by_step.values() for life in kept}
    assert [str(a) for a, _, _ in by_id[1].phases(10.0)] == ["leased", "running", "ready", "admitted"]
    assert by_id[1].account is Account.CONSUMED
    assert by_id[0].phases(10.0) == [(Account.LEASED, 1.0, 1.5)]
    assert by_id[7].phases(10.0) == [(Account.LEASED, 9.0, 9.0), (Account.RUNNING, 9.0, 10.0)]


# --- charts ----------------------------------------------------------------------------------------------------------------


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 8))
def test_ticks_are_round_cover_the_range_and_are_few(low: float, span: float, count: int) -> None:
    marks = ticks(low, low + span, count)
    step = marks[1] - marks[0]
    assert marks[0] <= low + 1e-6 * step
    assert marks[-1] >= low + span - 1e-6 * step
    assert len(marks) <= count + 3


def test_numbers_on_one_axis_share_their_decimals() -> None:
    assert [number(v, False, [0.0, 0.5, 1.0]) for v in (0.5, 1.0)] == ["0.5", "1.0"]
    assert [number(v, False, [0, 20_000, 40_000]) for v in (20_000, 40_000)] == ["20k", "40k"]
    assert number(0.25, percent=True) == "25%"
    assert number(math.nan) == "-"


def test_a_chart_leaves_out_what_is_not_finite_and_escapes_text() -> None:
    svg = charts.line_chart("x", [Series("<b>", [1, 2, 3], [1.0, math.nan, 2.0])], Axis("a & b"), Axis("c"))
    assert "<b>" not in svg
    assert "a &amp; b" in svg
    assert "nan" not in svg
    assert charts.line_chart("x", [Series("s", [1.0], [math.nan])], Axis("a"), Axis("b")) == ""


def test_a_long_series_is_drawn_with_few_points() -> None:
    xs = [float(i) for i in range(100_000)]
    assert len(charts.line_chart("x", [Series("s", xs, xs)], Axis("a"), Axis("b"))) < 40_000


def test_wilsons_interval_has_its_known_values() -> None:
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


# --- the command -------------------------------------------------------------------------------------------------------------


def written(tmp_path: Path, name: str, log: list[ev.AnyEvent]) -> Path:
    one = config(tmp_path)
    directory = tmp_path / name
    directory.mkdir()
    (directory / "config.yaml").write_text(config_to_yaml(one))
    with EventLog(directory / "events.log", fsync=False) as file:
        file.append(log)
    return directory


def test_the_command_makes_both_pages_again_and_puts_runs_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = written(tmp_path, "one", events()), written(tmp_path, "two", events()[:-10])
    (second / "summary.json").write_text('{"ended": "error: host0 died", "more": 1}')
    assert main(["report", str(first), "--json"]) == DONE
    answer = json.loads(capsys.readouterr().out)
    assert answer["summary"]["updates"] == 6
    assert Path(answer["report"]).read_bytes() == report_of(history(tmp_path))
    assert Path(answer["trace"]).read_bytes() == trace(history(tmp_path))
    assert not (first / "metrics.jsonl").exists()

    assert main(["report", str(first), str(second), "--json"]) == DONE
    answer = json.loads(capsys.readouterr().out)
    assert answer["report"] == str(tmp_path / "one-vs-two.html")
    assert [run["name"] for run in answer["runs"]] == ["one", "two"]
    assert answer["runs"][1]["summary"]["ended"] == "error: host0 died"
    assert answer["runs"][0]["figures"]["held-out exact"] == 0.85
    read = Page(Path(answer["report"]).read_bytes())
    assert "error: host0 died" in read.words
    assert read.fetched == ["data:,"]

    assert main(["report", str(tmp_path)]) == WRONG_USE
    assert main(["report", str(first), "a=b"]) == WRONG_USE
    assert "is no run's folder" in capsys.readouterr().err


def test_runs_that_differ_in_settings_are_compared_setting_by_setting(tmp_path: Path) -> None:
    one, other = (
        history(tmp_path),
        history_of(config(tmp_path, row_tokens=256, encoder_mode="per_micro_batch"), every_copy_encoded(events())),
    )
    runs = [Run("a", one, summary_of(one.record)), Run("b", other, summary_of(other.record))]
    words = Page(comparison(runs)).words
    assert "train.encoder_mode" in words
    assert "+300.0%" in words  # patches encoded: every reference instead of every image
    assert "train.updates" not in words
    assert figures_of(runs[0]).keys() == figures_of(runs[1]).keys()
    with pytest.raises(ValueError, match="2 to 6, got 1"):
        comparison(runs[:1])


def test_groups_that_never_made_it_are_marked_on_the_time_line(tmp_path: Path) -> None:
    log: list[ev.AnyEvent] = [ev.RunStarted(time_s=0.0, config={}), lease(0, "p0"), ev.Started(time_s=2.0, group_id=0)]
    log += [ev.Ready(time_s=3.0, group=group(0, 0, 0), episode_retries=0)]
    log += [ev.Expired(time_s=4.0, group_id=0, reason="too old & gone"), lease(1, "p0", 4.0)]
    log += [ev.Started(time_s=4.5, group_id=1), ev.Ready(time_s=5.0, group=group(1, 0, 0), episode_retries=0)]
    log += [ev.Admitted(time_s=5.0, plan=plan(0, 1))]
    page = report_of(history(tmp_path, log)).decode()
    assert page.count('class="dot c1"') == 2  # the legend's, and the group's
    assert "too old &amp; gone" in page
    assert "They add up: 2 groups" in page
