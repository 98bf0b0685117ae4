"""Requests made from the OpenAPI document, valid ones and others: none is a server error."""

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from live import served
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from loopwright.serving.settings import Limits

LIMITS = Limits(pixels=64 * 64, steps=3, sequence=64, prompt=200, images=2, queue=1000, concurrent=1000)


@pytest.fixture(scope="module")
def document(checkpoint, tmp_path_factory):
    with served(checkpoint("t2v"), folder=tmp_path_factory.mktemp("fuzz"), limits=LIMITS) as running:
        yield schemathesis.openapi.from_url(f"{running.url}/openapi.json")


@pytest.mark.parametrize("generation", GenerationMode)
def test_no_request_is_a_server_error(document, generation):
    asked = set()
    for operation in (found.ok() for found in document.get_all_operations()):

        @given(case=operation.as_strategy(generation_mode=generation))
        @settings(max_examples=4, deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
        def ask(case):
            asked.add((case.method, case.path))
            case.call_and_validate(checks=[not_a_server_error], timeout=30)

        try:
            ask()
        except Unsatisfiable:  # a path without parameters can only be asked for rightly
            assert generation is GenerationMode.NEGATIVE
    assert {("POST", "/v1/videos"), ("POST", "/v1/images/edits"), ("POST", "/rollout/generate")} <= asked
