# Copyright: kubenode.proxy contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The benchmark driver runs every benchmark, and reads the tables that they print."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.benchmarks import __main__ as driver
from tests.benchmarks import plots
from tests.benchmarks.many_agents import slope

DIRECTORY = Path(driver.__file__).parent
# Programs that measure nothing by themselves.
OTHERS = {"__main__", "plots", "payload", "measured_servers", "simulated_agents"}


def test_the_driver_knows_every_benchmark() -> None:
    programs = {path.stem for path in DIRECTORY.glob("*.py") if '__name__ == "__main__"' in path.read_text()}
    assert programs - OTHERS == {benchmark.module for benchmark in driver.BENCHMARKS.values()}
    assert set(plots.PLOTS) <= set(driver.BENCHMARKS)


def test_a_benchmark_without_its_program_is_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KUBENODE_HAPROXY", raising=False)
    assert set(driver.choice(["userspace", "hashing"])) == {"hashing"}
    assert "userspace is not run: the environment variable KUBENODE_HAPROXY is not set" in capsys.readouterr().err
    for needed in filter(None, (benchmark.needs for benchmark in driver.BENCHMARKS.values())):
        monkeypatch.setenv(needed, "/usr/sbin/program")
    assert set(driver.choice([])) == set(driver.BENCHMARKS)
    with pytest.raises(SystemExit, match="no such benchmark: other; --list"):
        driver.choice(["hashing", "other"])


def test_a_failed_benchmark_and_what_it_printed_are_reported(capfd: pytest.CaptureFixture[str]) -> None:
    command = driver.Benchmark(("sh", "-c", "echo a '|' b; exit 3"), "none")
    succeeded, text = driver.run("some", command)
    assert not succeeded
    assert "a | b\n" in text
    assert "exit status 3" in text.splitlines()[-1]
    assert capfd.readouterr().out == text


ROWS = """# machine
mode | services | seconds
none | 0 | 1
a | 100 | 2
b | 100 | 3
a | 10 | 1.5
# end, with other words
"""


def test_the_lines_of_a_plot_are_sorted_by_size_without_rows_that_have_none() -> None:
    plot = plots.Plot("x.svg", "", "", "", ("services",), {"seconds": ""}, "mode")
    lines: dict[str, object] = dict(plots.curves(plot, plots.table(ROWS)))
    assert lines == {"a": [(10, 1.5), (100, 2)], "b": [(100, 3)]}


def test_a_benchmark_that_printed_no_table_has_no_plots(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"modes has printed no row for modes-connection\.svg"):
        plots.draw("modes", "nothing\n", tmp_path)


def test_slopes_are_those_of_least_squares():
    exact = slope([(10.0, 7.0), (20.0, 12.0), (40.0, 22.0)])
    assert (exact["slope"], exact["error"], exact["intercept"]) == (0.5, 0.0, 2.0)
    # The residuals are 0.25, -0.5 and 0.25.
    rough = slope([(1.0, 2.0), (2.0, 2.0), (3.0, 3.5)])
    assert (rough["slope"], rough["intercept"]) == (0.75, 1.0) and rough["error"] == 0.43
    assert math.isnan(slope([(1.0, 1.0), (2.0, 2.0)])["error"])
