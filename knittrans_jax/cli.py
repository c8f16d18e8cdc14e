"""The command line. Exit status: 0 done, 1 failed, 2 wrong use or configuration.

With `--json` standard output carries one JSON object and nothing else; everything for people goes to standard error. Nothing is
imported before it is needed, so that checking a configuration and the roles without JAX never load it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from knittrans_jax.config import Config, ConfigError, load_config

DONE, FAILED, WRONG_USE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = _parser()
    options, more = parser.parse_known_args(arguments)  # argparse itself takes no settings after an option
    unknown = [one for one in more if one.startswith("-") or "=" not in one]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.overrides += more
    if getattr(options, "json", False):
        _keep_standard_output()
    try:
        return options.command(options)
    except ConfigError as error:
        return _complain(str(error), WRONG_USE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="knittrans", description="The path from rollout to training for LLM and VLM reinforcement learning in JAX."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str, json: bool) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        one.add_argument("config", metavar="CONFIG", help="a YAML file, such as configs/grid_lookup.yaml")
        one.add_argument("overrides", metavar="key.sub=value", nargs="*", help="settings that replace the file's")
        if json:
            one.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
        one.set_defaults(command=command)
        return one

    add("run", _run, "Run all roles on this machine.", json=True)
    check = add("check", _check, "Check a configuration and print what it comes to.", json=True)
    check.add_argument(
        "--topology",
        metavar="NAME",
        help="compile every program for this TPU, such as v5e:4x4, without one; print memory, FLOPs and collectives",
    )
    check.add_argument(
        "--run",
        action="store_true",
        help="run every program on the devices of this host, with random weights and made-up rows; print times and memory",
    )
    add("scheduler", _scheduler, "The scheduler role alone.", json=False)
    for name, command, text in (
        ("rollout", _rollout, "One rollout host's engine."),
        ("storage", _storage, "One rollout host's storage unit."),
        ("train", _train, "One training process."),
    ):
        role = add(name, command, text, json=False)
        role.add_argument("--index", type=int, required=True, metavar="I", help="its number, from 0")
    simulate = add("simulate", _simulate, "Compare admission policies on simulated workloads.", json=True)
    simulate.add_argument(
        "--pictures", type=Path, metavar="DIR", help="also write an SVG per workload and simulate.md, the figures"
    )
    simulate.add_argument("--out", type=Path, metavar="FILE", help="also write the JSON object to a file")
    text = "Run a recorded run's completions again under other settings, such as admission.policy=train_batch."
    what_if = commands.add_parser("what-if", help=text, description=text, allow_abbrev=False)
    what_if.add_argument("run", metavar="RUN", type=Path, help="a run's folder, such as runs/grid_lookup")
    what_if.add_argument("overrides", metavar="key.sub=value", nargs="*", help="settings that replace the run's")
    what_if.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    what_if.set_defaults(command=_what_if)
    text = "Run a benchmark; an unknown name lists them."
    bench = commands.add_parser("bench", help=text, description=text, allow_abbrev=False)
    bench.add_argument("name", metavar="NAME")
    bench.add_argument("overrides", metavar="key=value", nargs="*", help="settings that replace the benchmark's own")
    bench.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    bench.add_argument("--quick", action="store_true", help="sets quick=true, in benchmarks that have it: little, soon")
    bench.add_argument(
        "--out", type=Path, default=Path("runs/benchmarks"), metavar="DIR", help="where the JSON is kept"
    )
    bench.set_defaults(command=_bench)
    text = "Write a run's report.html and trace.json again; with several runs, a page that puts them side by side."
    report = commands.add_parser("report", help=text, description=text, allow_abbrev=False)
    report.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run's folder, such as runs/grid_lookup")
    report.add_argument("--json", action="store_true", help="one JSON object on standard output, nothing else")
    report.add_argument(
        "--out", type=Path, metavar="FILE", help="of several runs: the page (default: A-vs-B.html beside the first run)"
    )
    report.set_defaults(command=_report, overrides=[])
    return parser


# --- commands --------------------------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    from rich.console import Console

    from knittrans_jax.launch.check import check_run
    from knittrans_jax.launch.launcher import run
    from knittrans_jax.observe.summary import summary_to_dict
    from knittrans_jax.observe.table import summary_panel

    config = load_config(options.config, options.overrides)
    check_run(config)
    console = Console(stderr=options.json)
    result = run(config, console)
    if options.json:
        _print_json(summary_to_dict(result.summary))
    else:
        console.print(summary_panel(result.summary, str(config.directory)))
    return DONE if result.error is None else _complain(result.error, FAILED)


def _check(options: argparse.Namespace) -> int:
    from rich.console import Console

    from knittrans_jax.launch.check import arithmetic_panel, check_run

    config = load_config(options.config, options.overrides)
    arithmetic = check_run(config)
    answer: dict[str, Any] = arithmetic.as_dict()
    console = Console(stderr=options.json)
    if not options.json:
        console.print(arithmetic_panel(config, arithmetic))
    if options.topology:
        from knittrans_jax.launch.topology import compile_for_topology, report_table

        reports = compile_for_topology(config, options.topology)
        answer["topology"] = {"name": options.topology, "programs": [report.as_dict() for report in reports]}
        if not options.json:
            console.print(report_table(options.topology, reports))
    if options.run:
        from knittrans_jax.launch.trial import TrialError, run_trial, trial_table

        if options.topology:  # it has told JAX that there is nothing but a CPU
            raise ConfigError("--run and --topology: one at a time (value --run)")
        try:
            trial = run_trial(config)
        except TrialError as error:
            return _complain(str(error), FAILED)
        answer["run"] = trial.as_dict()
        if not options.json:
            console.print(trial_table(trial))
    if options.json:
        _print_json(answer)
    return DONE


def _scheduler(options: argparse.Namespace) -> int:
    from knittrans_jax.admission.service import RunFailed, run_scheduler
    from knittrans_jax.launch.environment import LAUNCHED
    from knittrans_jax.observe.metrics import observe

    config = load_config(options.config, options.overrides)
    directory = _directory(config)
    (directory / "control.json").unlink(missing_ok=True)  # of an earlier scheduler: nobody may find it any more
    try:
        run_scheduler(config, directory)
    except RunFailed as error:
        return _complain(str(error), FAILED)
    finally:
        if LAUNCHED not in os.environ and (directory / "events.log").exists():
            observe(config)
    return DONE


def _rollout(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)
    index = _index(options.index, "rollout.hosts", config.rollout.hosts)
    from knittrans_jax.rollout.host import run_rollout

    run_rollout(config, _directory(config), index)
    return DONE


def _storage(options: argparse.Namespace) -> int:
    from knittrans_jax.transfer.storage import run_storage

    config = load_config(options.config, options.overrides)
    index = _index(options.index, "rollout.hosts", config.rollout.hosts)
    run_storage(config, _directory(config), index)
    return DONE


def _train(options: argparse.Namespace) -> int:
    config = load_config(options.config, options.overrides)
    index = _index(options.index, "train.processes", config.train.processes)
    if config.train.processes > 1 and config.train.coordinator.endswith(":0"):
        raise ConfigError(
            "train.coordinator: only `knittrans run` picks a free port by itself; processes that are started one by one need "
            f"the same host:port, that of process 0 (value {config.train.coordinator!r})"
        )
    from knittrans_jax.train.process import run_train

    run_train(config, _directory(config), index)
    return DONE


def _bench(options: argparse.Namespace) -> int:
    from rich.console import Console

    from knittrans_jax.benchmarks.harness import BenchFailed, report_to_dict, write_report
    from knittrans_jax.benchmarks.registry import load_bench
    from knittrans_jax.benchmarks.table import report_view

    bench = load_bench(options.name, [*options.overrides, *(["quick=true"] if options.quick else [])])
    progress = Console(stderr=True)
    try:
        report = bench.run(
            bench.settings, lambda text: progress.print(text, style="dim", markup=False, highlight=False)
        )
        result = report_to_dict(bench.name, msgspec.to_builtins(bench.settings), report)
        path = write_report(options.out, result)
    except (BenchFailed, OSError) as error:
        return _complain(f"bench {bench.name}: {error}", FAILED)
    if options.json:
        _print_json(result)
    else:
        Console().print(report_view(result, report, str(path)))
    return DONE


def _report(options: argparse.Namespace) -> int:
    from knittrans_jax.admission.log import LogError
    from knittrans_jax.observe.again import compare_runs, report_run

    if options.overrides:
        raise ConfigError(f"report: takes runs, no settings (value {' '.join(options.overrides)!r})")
    if options.out is not None and len(options.runs) < 2:
        raise ConfigError(f"--out: one run's report is written into its folder (value {str(options.out)!r})")
    try:
        several = len(options.runs) > 1
        answer = compare_runs(options.runs, options.out) if several else report_run(options.runs[0])
    except (LogError, OSError) as error:
        return _complain(f"report: {error}", FAILED)
    if options.json:
        _print_json(answer)
    else:
        sys.stdout.write("".join(f"{answer[key]}\n" for key in ("report", "trace") if key in answer))
    return DONE


def _simulate(options: argparse.Namespace) -> int:
    from knittrans_jax.simulate.show import show_progress, suite_view, write_pictures
    from knittrans_jax.simulate.suite import load_suite, run_suite

    suite = load_suite(options.config, options.overrides)
    try:
        with show_progress() as progress:
            result = run_suite(suite, progress, [options.config, *options.overrides])
        if options.pictures is not None:
            write_pictures(options.pictures, result)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
    except (RuntimeError, TimeoutError, OSError) as error:
        return _complain(f"simulate: {error}", FAILED)
    if options.json:
        _print_json(result)
    else:
        from rich.console import Console

        Console().print(suite_view(result))
    return DONE


def _what_if(options: argparse.Namespace) -> int:
    from knittrans_jax.admission.log import LogError
    from knittrans_jax.simulate.recorded import NothingRecorded
    from knittrans_jax.simulate.what_if import what_if, what_if_view

    try:
        answer = what_if(options.run, options.overrides)
    except (LogError, NothingRecorded, OSError) as error:
        return _complain(f"what-if: {error}", FAILED)
    if options.json:
        _print_json(answer)
    else:
        from rich.console import Console

        Console().print(what_if_view(answer))
    return DONE


# --- small things ------------------------------------------------------------------------------------------------------------


def _directory(config: Config) -> Path:
    try:
        config.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir: cannot make the run's folder {config.directory}: {error.strerror}") from error
    return config.directory


def _index(index: int, key: str, count: int) -> int:
    if not 0 <= index < count:
        raise ConfigError(f"--index: {key} = {count} allows 0 to {count - 1} (value {index})")
    return index


def _keep_standard_output() -> None:
    """Leaves standard output to `sys.stdout`: what C libraries and child processes print there goes to standard error."""
    try:
        ours = sys.stdout.fileno() == 1
    except OSError:
        ours = False  # somebody who called `main` took it already
    if ours:
        sys.stdout.flush()
        sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def _complain(message: str, status: int) -> int:
    sys.stderr.write(f"knittrans: {message}\n")
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    sys.exit(main())
