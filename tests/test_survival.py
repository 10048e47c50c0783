"""What kills a process, hangs or floods is a finding that names its case and is shrunk; files survive a kill at any moment."""

import json
import os
import random
import signal
import textwrap
import time
from types import SimpleNamespace

import pytest

from flashproof.fuzz.case import Case
from flashproof.fuzz.corpus import Record, load, save
from flashproof.fuzz.engine import hunt
from flashproof.fuzz.found import Policy
from flashproof.fuzz.judge import Judge
from flashproof.fuzz.region import Region
from flashproof.fuzz.worker import Worker
from flashproof.oracles.finding import Finding

DYING = """
    import os, signal, sys, time
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    def attention(query, key, value, is_causal=False):
        if key.shape[2] > 16:
            {}
        return sdpa(query, key, value, is_causal=is_causal)
"""
WAYS = {
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", "crash:"),
    "SIGABRT": ("os.abort()", "crash:"),
    "SIGFPE": ("os.kill(os.getpid(), signal.SIGFPE)", "crash:"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "crash:"),
    "exit": ("os._exit(3)", "crash:"),
    "hang": ("time.sleep(3600)", "hang:"),
    "memory": ("query.new_empty(1 << 50)", "exception:"),
    "recursion": ("attention(query, key, value)", "exception:"),
}
REGION = Region(
    dtypes=("float32",), max_head_dim=16, max_len=64, gqa=False, dv_differs=False, masks=("none",), scale=False, backward=False,
    layouts=False, min_len=1,
)  # fmt: skip
KILLS = 200


@pytest.mark.slow
@pytest.mark.parametrize(("code", "key"), WAYS.values(), ids=WAYS)
def test_a_hunt_goes_on_after_a_death_and_shrinks_its_case(tmp_path, code, key):
    (tmp_path / "t.py").write_text(textwrap.dedent(DYING).format(code))
    with Worker(f"{tmp_path}/t.py:attention", contract="may_leak", deadline=1.0) as worker:
        judge = Judge(worker, "may_leak", None)
        campaign = hunt(
            judge, REGION, examples=40, seed=2, policy=Policy(distinct=1, shrink_seconds=30.0, slow_probes=6)
        )
        assert worker.run(Case(requires_grad="")).status == "ok"
    found = campaign.failures[0]
    assert found.key.startswith(key) and campaign.cases > campaign.cases_to_first_failure
    assert found.case.Lk > 16 and (key == "hang:" or found.case.Lk == 17), found.case
    assert campaign.budget, "right answers are judged beside the deaths"


def _writes(folder):
    """Save cases and log lines without end."""
    log = SimpleNamespace(_log=open(folder / "log.jsonl", "a", encoding="utf-8"))  # noqa: SIM115 (until it is killed)
    for n in range(1 << 30):
        case = Case(Lk=1 + n % 50, seed=n)
        save(Record("t.py:f", case, findings=(Finding("value", "o", "wrong " * 50),)), folder)
        Worker._write(log, {"start": n, "case": case.to_json()}, sync=True)  # type: ignore[arg-type]


def test_files_are_whole_after_a_kill_at_any_moment(tmp_path):
    dice = random.Random(5)  # noqa: S311 (any moment will do)
    for _ in range(KILLS):
        child = os.fork()
        if child == 0:
            try:
                _writes(tmp_path)
            finally:
                os._exit(1)
        time.sleep(dice.uniform(0.0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    saved = [p for p in tmp_path.iterdir() if p.suffix == ".json"]
    assert saved
    for path in saved:
        assert load(path).findings[0].oracle == "value"
    lines = (tmp_path / "log.jsonl").read_text(encoding="utf-8").split("\n")
    torn = 0
    for line in lines:
        try:
            json.loads(line or "{}")
        except ValueError:
            torn += 1
    assert torn <= KILLS, "a kill tears at most the line that was being written"
