"""What `/openapi.json` says is what the server does: schemathesis asks it anything.

A few requests a route here; with SCHEMATHESIS_EXAMPLES=100 that many, others each time, and some
thousands that walk along the borders of every field.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from live import LiveServer, live_server
from schemathesis.checks import CheckContext
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi import checks

from mlx_manager.mlx_server.config import MLXServerSettings
from mlx_manager.mlx_server.main import create_app
from mlx_manager.mlx_server.schemas.wire import Timed

THOROUGH = "SCHEMATHESIS_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "5"))
SECRET = "sk-mlx-of-this-test"
TOKENS = 4


# A request may give itself less time than anything takes: that is 504, and no failure. That no other
# is answered so, `in_time` sees.
config = {"checks": {"not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", "504"]}}}
# A server that has been drained takes nothing more, a stream of events has no end, and there is no
# hub here.
schema = schemathesis.openapi.from_dict(
    create_app(MLXServerSettings(api_key=SECRET)).openapi(),
    config=SchemathesisConfig.from_dict(config),
).exclude(
    path=["/v1/admin/drain", "/v1/admin/events", "/v1/admin/hub/search", "/v1/admin/hub/plan"]
)
schema.config.phases.coverage.enabled = THOROUGH


# With a parameter each route's test has a name of its own; schemathesis gives all of them the same,
# and tests that run beside each other are told apart by that.
@pytest.fixture(scope="module", params=[""], ids=["served"])
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    with live_server(log, api_key=SECRET, admin_token=SECRET) as server:
        yield server
    assert "Traceback" not in log.read_text()


@schema.hook("map_body")
def short(context: Any, body: Any) -> Any:
    """Answers of some tokens: nobody waits for more."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            asked = body.get(name)
            if asked is None or (isinstance(asked, int | float) and asked > TOKENS):
                body[name] = TOKENS
    return body


def in_time(_: CheckContext, response: schemathesis.Response, case: schemathesis.Case) -> None:
    """504 is for who has asked for a limit."""
    asked = case.body if isinstance(case.body, dict) else {}
    if response.status_code == 504:
        assert any(asked.get(name) is not None for name in Timed.model_fields), response.text


@schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    derandomize=not THOROUGH,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_every_answer_is_documented_and_none_is_a_failure(
    case: schemathesis.Case, server: LiveServer
) -> None:
    case.call_and_validate(
        base_url=server.url,
        headers={"authorization": f"Bearer {SECRET}"},
        additional_checks=[in_time],
        excluded_checks=[
            # What fits the schema may still not fit the model: an id beyond its vocabulary, a tool
            # that is named and not there.
            checks.positive_data_acceptance,
            # Pydantic reads "5", false and 1.0 as the numbers that they can only mean.
            checks.negative_data_rejection,
            # It takes one of the two headers away that a key may be in. `test_auth` has this.
            checks.ignored_auth,
            # Starlette names the methods of the first route of a path only.
            checks.allow_header_conformance,
        ],
    )
