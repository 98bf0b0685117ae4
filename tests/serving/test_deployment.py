"""What an orchestrator is told of a server, and that it is so."""

import json

import pytest

from loopwright.cli import main
from loopwright.cli.serve import _without
from loopwright.serving.refusal import Refusal


@pytest.fixture
def card(checkpoint, tmp_path):
    path, flags = tmp_path / "card.json", ("--device", "cpu", "--port", "8123", "--folder", str(tmp_path / "state"))
    assert main(["serve", str(checkpoint("t2v")), *flags, "--replicas", "3", "--deployment-card", str(path)]) == 0
    return json.loads(path.read_text())


def test_a_deployment_card_says_what_to_start_and_what_it_needs(card, server, tmp_path):
    (model,) = card["models"]
    assert model["name"] == next(iter(server.service.models.named)) and "text_to_video" in model["tasks"]
    assert (card["endpoint"]["port"], card["endpoint"]["scheme"]) == (8123, "http")
    assert (card["resources"]["replicas"], card["resources"]["gpus"]) == (3, 0)
    assert card["state"]["folder"] == str(tmp_path / "state") and not (tmp_path / "state").exists()
    assert card["stopping"] == {"signal": "SIGTERM", "grace_seconds": 20.0, "renewing": "SIGHUP"}


def test_the_addresses_on_a_deployment_card_answer(card, server):
    probes = [probe["path"] for probe in card["probes"].values()]
    for path in (card["endpoint"]["openapi"], card["endpoint"]["metrics"], *probes):
        assert server.http.get(path).status_code == 200


def test_a_server_whose_engine_has_ended_is_not_alive(server, monkeypatch):
    monkeypatch.setattr(server.service.driver, "error", RuntimeError("a bug"))
    answer = server.http.get("/livez")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_ended")
    with pytest.raises(Refusal):
        server.service.driver.require()


def test_the_command_is_the_one_that_was_given_but_for_the_card():
    words = ["serve", "m", "--deployment-card", "x.json", "--port", "1", "--deployment-card=y"]
    assert _without("--deployment-card", words) == ["serve", "m", "--port", "1"]


def test_a_fleet_of_nobody_is_refused(checkpoint, capsys):
    assert main(["serve", str(checkpoint("t2v")), "--replicas", "0"]) == 2
    assert "a fleet has one replica at least" in capsys.readouterr().err
