"""Every parity claim of every card is run through `verify`, and fails when the arithmetic is disturbed."""

from dataclasses import replace

import pytest

from loopwright import catalog
from loopwright.card import dumps
from loopwright.errors import CardError, RequestError
from loopwright.models.wan import forward
from loopwright.parity import verify

SMALL = {"height": 32, "width": 32, "num_inference_steps": 4}
KINDS = ("t2v", "i2v", "ti2v", "a14b", "a14b_i2v")


def stated(claim):
    """A claim without its bound, which depends on the solver."""
    return claim.level, claim.reference, claim.task, claim.metric, claim.precision


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("scheduler", "precision"), [("euler", None), ("unipc", None), ("unipc", "bfloat16")])
def test_every_claim_of_a_card_holds(checkpoint, kind, scheduler, precision):
    folder = checkpoint(kind, scheduler)
    findings = list(verify(str(folder), device="cpu", dtype=precision, parameters=SMALL))
    claims = [claim for claim in catalog.find(str(folder)).claims if claim.precision == (precision or "float32")]
    assert {finding.claim for finding in findings} == set(claims) and len(findings) == len(claims)
    assert [f"{f.claim.level} {f.claim.task} {f.measured}: {f.detail}" for f in findings if not f.holds] == []


def test_the_claims_of_published_cards_are_those_run_here(checkpoint):
    run = {stated(claim) for kind in KINDS for claim in catalog.find(str(checkpoint(kind, "unipc"))).claims}
    for card in catalog.known():
        assert {stated(claim) for claim in card.claims} <= run, card.name


@pytest.mark.parametrize(("precision", "frames", "side", "steps"), [("float32", 5, 64, 3), ("bfloat16", 1, 32, 2)])
def test_every_claim_of_the_shipped_card_holds(precision, frames, side, steps):
    """In bfloat16, which a host computes slowly, of single small frames."""
    for name in catalog.SHIPPED:
        small = {"num_inference_steps": steps, "num_frames": frames, "height": side, "width": side}
        findings = list(verify(name, device="cpu", dtype=precision, parameters=small))
        claims = [claim for claim in catalog.find(name).claims if claim.precision == precision]
        assert {finding.claim for finding in findings} == set(claims) and claims
        assert [f"{f.claim.level} {f.measured}: {f.detail}" for f in findings if not f.holds] == []


def test_a_disturbed_network_breaks_the_claims_and_the_step_is_named(checkpoint, monkeypatch):
    true = forward.velocity

    def disturbed(transformer, latents, timestep, text, **more):
        out = true(transformer, latents, timestep, text, **more)
        return out * 1.0001 if timestep[0] < 950 else out

    monkeypatch.setattr(forward, "velocity", disturbed)
    folder = checkpoint("t2v", "euler")
    only = {"task": "text_to_video", "against": "diffusers", "device": "cpu", "parameters": SMALL}
    findings = {f.claim.level: f for f in verify(str(folder), **only)}
    assert not findings["trajectory"].holds
    assert "first divergence at step" in findings["trajectory"].detail
    assert "step 1 " not in findings["trajectory"].detail


def test_a_disturbed_autoencoder_breaks_the_component_claim(checkpoint, monkeypatch):
    true = forward._statistics
    monkeypatch.setattr(forward, "_statistics", lambda vae, like: tuple(item * 1.1 for item in true(vae, like)))
    only = {"task": "text_to_video", "against": "diffusers", "device": "cpu", "parameters": SMALL}
    findings = list(verify(str(checkpoint("t2v", "euler")), **only))
    assert {f.claim.level for f in findings if not f.holds} == {"component", "output"}


def test_what_cannot_be_verified_is_said(checkpoint, tmp_path):
    folder = str(checkpoint("t2v", "euler"))
    with pytest.raises(RequestError, match=r"unknown reference.*comfyui.*choices: diffusers, self"):
        list(verify(folder, against="comfyui", device="cpu"))
    with pytest.raises(RequestError, match=r"no such task.*choices: text_to_video, video_to_video"):
        list(verify(folder, task="image_to_video", device="cpu"))
    card = catalog.find(folder)
    (tmp_path / "card.json").write_text(dumps(replace(card, claims=(replace(card.claims[0], level="rollout"),))))
    with pytest.raises(CardError, match=r"unknown level.*rollout.*choices: component"):
        list(verify(str(tmp_path), device="cpu"))
