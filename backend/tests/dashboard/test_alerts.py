"""What each alert fires on, and what it does not, by Prometheus's promtool."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from dashboard import RULES
from prometheus import needs_prometheus, program

from mlx_manager.mlx_server import errors
from mlx_manager.mlx_server.errors import MLXManagerError, ModelTooLarge

SERVER, ENGINE = 'instance="host:8000"', 'instance="host:8000",model_name="m"'
UP = f'up{{job="mlx-manager",{SERVER}}}'
READY = f"mlx_manager_ready{{{SERVER}}}"
ANSWERS = f'mlx_manager_request_success_total{{finished_reason="stop",{ENGINE}}}'
REFUSED = f'mlx_manager_request_errors_total{{code="model_not_found",model_name="",{SERVER}}}'
FAILED = f'mlx_manager_request_errors_total{{code="generation_failed",{ENGINE}}}'
WAITING = f"mlx_manager_num_requests_waiting{{{ENGINE}}}"
FAST, SLOW, ALL = (
    f'mlx_manager_time_to_first_token_seconds_bucket{{le="{le}",{ENGINE}}}'
    for le in ("10.0", "20.0", "+Inf")
)
HELD = f"mlx_manager_kv_cache_usage_perc{{{ENGINE}}}"
GONE = f"mlx_manager_model_evictions_total{{{ENGINE}}}"
DOWN = f'mlx_manager_model_down{{reason="it was ended by SIGSEGV",{ENGINE}}}'
LOST = f"mlx_manager_audit_records_lost_total{{{SERVER}}}"

# One value a minute, for half an hour: `a+bxn` is a, and n times b more than before.
WELL = {
    UP: "1x30",
    READY: "1x30",
    ANSWERS: "0+60x30",
    # As often as there are answers, and nobody's fault here.
    REFUSED: "0+60x30",
    FAILED: "0+1x30",
    WAITING: "9 9 9 9 9 0 " * 5,
    FAST: "0+60x30",
    SLOW: "0+60x30",
    ALL: "0+60x30",
    HELD: "0.9x30",
    GONE: "0x20 1+1x10",
    DOWN: "_x30",
    LOST: "0x30",
}
ILL = {
    "MLXManagerDown": {UP: "1x20 0x10"},
    "MLXManagerNotReady": {READY: "1x20 0x10"},
    "MLXManagerCallsFail": {FAILED: "0+10x30"},
    "MLXManagerQueueLong": {WAITING: "0 1x30"},
    "MLXManagerFirstTokenSlow": {FAST: "0+58x30"},
    "MLXManagerPagesNearlyFull": {HELD: "0.9x10 1x20"},
    "MLXManagerModelsThrash": {GONE: "0+1x30"},
    "MLXManagerModelDown": {DOWN: "_x20 1x10"},
    "MLXManagerAuditRecordsLost": {LOST: "0x20 1+1x10"},
}


def firing(folder: Path, series: dict[str, str], expected: list[str]) -> str:
    """What promtool has to say if others than `expected` fire after half an hour."""
    names = "count by (alertname) (ALERTS{alertstate='firing'})"
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in expected]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [{"expr": names, "eval_time": "30m", "exp_samples": samples}],
    }
    # JSON is YAML.
    file = folder / "tests.yml"
    file.write_text(
        json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [test]})
    )
    promtool = program("promtool")
    assert promtool is not None
    done = subprocess.run(
        [promtool, "test", "rules", file], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr if done.returncode else ""


@needs_prometheus
def test_nothing_fires_while_all_is_well(tmp_path: Path) -> None:
    assert not firing(tmp_path, WELL, [])


@needs_prometheus
@pytest.mark.parametrize("alert", ILL)
def test_each_alert_fires_on_what_it_is_for_and_nothing_else_does(
    alert: str, tmp_path: Path
) -> None:
    assert not firing(tmp_path, WELL | ILL[alert], [alert])


@needs_prometheus
def test_calls_that_all_fail_fire_though_none_was_ever_answered(tmp_path: Path) -> None:
    series = {name: values for name, values in WELL.items() if name not in (ANSWERS, REFUSED)}
    assert not firing(tmp_path, series, ["MLXManagerCallsFail"])


def test_every_alert_has_been_tried() -> None:
    assert set(re.findall(r"alert: (\w+)", RULES.read_text())) == set(ILL)


def test_calls_fail_by_the_codes_that_are_the_servers_doing() -> None:
    """Those of a status from 500 on; that a model fits no memory is for who asks to know."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    found = {
        kind.code
        for kind in kinds
        if issubclass(kind, MLXManagerError) and kind.status >= 500 and kind is not ModelTooLarge
    }
    [listed] = re.findall(r'request_errors_total\{code=~"([\w|]+)"\}', RULES.read_text())
    assert set(listed.split("|")) == found
