"""What the command line promises to programs."""

import subprocess
import sys

NOISY = """
import os, sys
from knittrans_jax import cli
def check(options):
    os.write(1, b"a solver's remark\\n")
    os.system("echo said by a child")
    cli._print_json({"found": 1})
    return cli.DONE
cli._check = check
sys.exit(cli.main(["check", "any.yaml", *sys.argv[1:]]))
"""


def run_noisy(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", NOISY, *arguments], capture_output=True, text=True, timeout=60, check=True
    )


def test_with_json_standard_output_has_one_object_whatever_libraries_and_children_print():
    done = run_noisy("--json")
    assert done.stdout == '{"found":1}\n'
    assert "a solver's remark" in done.stderr
    assert "said by a child" in done.stderr


def test_without_json_nothing_is_moved():
    assert "a solver's remark" in run_noisy().stdout
