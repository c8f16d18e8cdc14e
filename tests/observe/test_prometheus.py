"""The Prometheus endpoint: figures of a real scheduler, in the text format, on a port of its own."""

import dataclasses
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from knittrans_jax.admission.scheduler import SchedulerCore
from knittrans_jax.admission.service import serve
from knittrans_jax.config import ConfigError
from knittrans_jax.observe.prometheus import AGED, CONTENT_TYPE, PrometheusEndpoint, Snapshot, exposition, snapshot_of

from ..admission.model import Model, make_config, make_core, make_prompts

SAMPLE = re.compile(r'(knittrans_\w+)(?:\{((?:\w+="(?:[^"\\\n]|\\.)*",?)+)\})? (\S+)')


def parsed(text: str) -> dict[str, float]:
    """Samples by name and labels; checks that every line is of the format and every family is declared once, before it."""
    samples, declared = {}, []
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line[7:].split(" ")
            assert kind in ("gauge", "counter", "untyped")
            assert name.endswith("_total") == (kind == "counter")
            declared.append(name)
        elif not line.startswith("# HELP "):
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] == declared[-1]
            key = match[1] + (f"{{{match[2]}}}" if match[2] else "")
            assert key not in samples
            samples[key] = float(match[3])
    assert len(set(declared)) == len(declared)
    return samples


def check_half_way(check: Callable[[SchedulerCore, Snapshot], None]) -> None:
    """Runs a scheduler to its end and lets `check` look at it once, after five updates, 2.5 s after the newest event."""
    checked = []

    def after_step(model: Model) -> None:
        if model.core.state.version == 5 and not checked:
            checked.append(True)
            check(model.core, snapshot_of(model.core, model.now_s + 2.5))

    Model(make_core(make_config(), make_prompts({"a": 60})), after_step=after_step).run()
    assert checked


def half_way() -> Snapshot:
    found: list[Snapshot] = []
    check_half_way(lambda _, snapshot: found.append(snapshot))
    return found[0]


def test_the_figures_are_the_schedulers_and_the_accounts_add_up() -> None:
    check_half_way(check_figures)


def check_figures(core: SchedulerCore, snapshot: Snapshot) -> None:
    samples = parsed(exposition(snapshot))
    accounts = {key: value for key, value in samples.items() if key.startswith("knittrans_groups{")}
    assert sum(accounts.values()) == core.state.next_group_id
    assert accounts['knittrans_groups{account="consumed"}'] == 2 * core.state.version
    assert samples["knittrans_updates_total"] == core.state.version == 5
    ready = [value for key, value in samples.items() if key.startswith("knittrans_ready_groups")]
    assert sum(ready) == accounts['knittrans_groups{account="ready"}']
    assert samples["knittrans_trajectories_consumed_total"] == core.figures.trajectories
    assert samples['knittrans_payload_bytes_total{kind="unique"}'] == core.figures.unique_bytes > 0
    gap = samples['knittrans_staleness_updates_mean{cause="gap"}']
    parts = [samples[f'knittrans_staleness_updates_mean{{cause="{cause}"}}'] for cause in ("in_flight", "in_queue")]
    assert gap == pytest.approx(sum(parts))
    ages = {key: value for key, value in samples.items() if key.startswith("knittrans_account_age_seconds")}
    assert len(ages) == 2 * sum(accounts[f'knittrans_groups{{account="{name}"}}'] > 0 for name in AGED)
    assert all(value >= 2.5 for value in ages.values())
    assert samples['knittrans_host_silent_seconds{host="host0"}'] >= 2.5


def test_labels_are_escaped() -> None:
    one = half_way()
    odd = dataclasses.replace(one, ready={'a"b\\c\nd': 3})
    assert parsed(exposition(odd))['knittrans_ready_groups{kind="a\\"b\\\\c\\nd"}'] == 3


def get(address: str) -> tuple[str, str]:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return answer.read().decode(), answer.headers["Content-Type"]


def test_the_newest_snapshot_is_served_and_nothing_else() -> None:
    one = half_way()
    with PrometheusEndpoint("127.0.0.1", 0) as endpoint:
        with pytest.raises(urllib.error.HTTPError, match="503") as refused:
            get(endpoint.address)
        refused.value.close()
        endpoint.show(one)
        assert get(endpoint.address) == (exposition(one), CONTENT_TYPE)
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            get(endpoint.address.replace("/metrics", "/etc/passwd"))
        refused.value.close()
        port = int(endpoint.address.split(":")[2].split("/")[0])
        with pytest.raises(ConfigError, match=rf"observe.prometheus_port: cannot listen .*\(value {port}\)"):
            PrometheusEndpoint("127.0.0.1", port)


def test_a_scheduler_serves_its_figures_while_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    core = make_core(make_config(observe__prometheus_port=0, launch__stop_timeout_s=0.2), make_prompts({"a": 60}))
    stop = threading.Event()
    thread = threading.Thread(target=serve, args=(core, tmp_path, stop))
    thread.start()
    try:
        said, deadline_s, text = "", time.monotonic() + 20, ""
        while "/metrics" not in said:
            assert time.monotonic() < deadline_s
            said += capsys.readouterr().err
            time.sleep(0.02)
        address = said.split()[-1]
        assert address.startswith("http://127.0.0.1:")
        while not text:
            assert time.monotonic() < deadline_s
            try:
                text, _ = get(address)
            except urllib.error.HTTPError as error:
                error.close()
                time.sleep(0.02)
    finally:
        stop.set()
        thread.join(20)
    assert not thread.is_alive()
    samples = parsed(text)
    assert samples["knittrans_updates_wanted"] == 12
    assert samples["knittrans_published_version"] == -1
    with pytest.raises(urllib.error.URLError):
        get(address)
