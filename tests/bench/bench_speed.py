"""What `make bench` measures: cases a second, time to find and shrink, start-up, memory; all on one core."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from flashproof.fuzz.engine import hunt
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.worker import Worker

EXAMPLES = {"blockwise": 300, "sdpa_math": 300, "triton_flash": 100}
GROSS = ("planted_head_mapping", "planted_tail_mask", "planted_dropped_delta")


@pytest.fixture(autouse=True, scope="module")
def one_core():
    """This process and its children stay on one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)


def campaign(target: str, **budget):
    with Worker(target) as worker:
        judge = Judge(worker)
        return hunt(judge, seed=0, **budget)


@pytest.mark.parametrize("target", EXAMPLES)
def bench_cases_a_second(benchmark, target):
    """Default cases, forward and backward, drawn, run in a worker and judged."""
    with Worker(target) as worker:

        def fuzz():
            judge = Judge(worker)  # remembers nothing of the round before
            return hunt(judge, seed=0, examples=EXAMPLES[target])

        done = benchmark.pedantic(fuzz, rounds=3, warmup_rounds=1)
    assert not done.failures
    benchmark.extra_info |= {
        "what": f"cases a second, `{target}`",
        "value": done.cases / benchmark.stats.stats.median,
        "unit": "1/s",
    }


@pytest.mark.parametrize("target", GROSS)
def bench_find_and_shrink(benchmark, target):
    """From the first case of a campaign to the shrunk failure of a gross planted bug."""
    done = benchmark.pedantic(lambda: campaign(target, examples=100), rounds=1)
    assert done.failures
    found = done.seconds_to_first_failure
    benchmark.extra_info |= {"what": f"first failure of `{target}`", "value": found, "unit": "s"}
    benchmark.extra_info |= {
        "also": [{"what": f"campaign with every failure shrunk, `{target}`", "value": done.seconds, "unit": "s"}]
    }


def command(*words: str) -> subprocess.Popen[bytes]:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    return subprocess.Popen([sys.executable, "-m", "flashproof", *words], env=env, stdout=subprocess.DEVNULL)


def bench_start_up(benchmark):
    """The command from its start to the end of a run of one case."""
    assert benchmark.pedantic(lambda: command("fuzz", "textbook", "--examples", "1").wait(), rounds=3) == 0
    benchmark.extra_info |= {
        "what": "start-up and one case, `textbook`",
        "value": benchmark.stats.stats.median,
        "unit": "s",
    }


def resident(root: int) -> int:
    """Bytes that a process and its descendants hold, shared pages counted once."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
    family, grown = {root}, True
    while grown:
        more = {p for p, parent in parents.items() if parent in family} - family
        family, grown = family | more, bool(more)
    return sum(map(proportional_set, family))


def proportional_set(pid: int) -> int:
    try:
        rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:")), 0)


@pytest.mark.parametrize("target", ["blockwise", "triton_flash"])
def bench_peak_memory(benchmark, target):
    """The largest memory of the command and its worker together, sampled ten times a second."""

    def peak():
        process, most = command("fuzz", target, "--examples", str(EXAMPLES[target])), 0
        while process.poll() is None:
            most = max(most, resident(process.pid))
            time.sleep(0.1)
        return most

    most = benchmark.pedantic(peak, rounds=1)
    benchmark.extra_info |= {"what": f"peak memory, `{target}`", "value": most / 2**30, "unit": "GiB"}
