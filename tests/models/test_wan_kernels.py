"""A request's choice of attention and kernels on Wan: diffusers' bits by default, bound for one call, never lost."""

import threading
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

import loopwright
import tiny
from loopwright import api, catalog
from loopwright.backends import attention
from loopwright.backends.kernels import plain
from loopwright.card import Component, derive
from loopwright.engine.instance import Instance, Store
from loopwright.engine.job import Job
from loopwright.errors import BackendError, RequestError
from loopwright.models import wan
from loopwright.models.wan.attention import Processor
from loopwright.models.wan.choice import Choice, Holder, choice_of
from loopwright.models.wan.forward import velocity
from loopwright.models.wan.install import bound, install
from loopwright.program import resolve
from support import media_for, run, same

DEFAULT = ("sdpa", "plain")
COMPONENT = Component("diffusers.WanTransformer3DModel", dtype="float32")


def network(*, image: bool = False, dtype: torch.dtype = torch.float32) -> WanTransformer3DModel:
    torch.manual_seed(1)
    module = tiny._transformer(16, image, clip=image).eval()
    tiny._spread(module)
    for name, parameter in module.named_parameters():
        kept = any(word in name for word in module._keep_in_fp32_modules)
        parameter.data = parameter.data if kept else parameter.data.to(dtype)
    return module


def inputs(module: WanTransformer3DModel, *, per_token: bool = False) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    latents = torch.randn(2, module.config.in_channels, 3, 4, 6, generator=generator).to(module.dtype)
    times = torch.tensor([900.0, 200.0])
    clip = torch.randn(2, 5, 4, generator=generator) if module.config.image_dim else None
    return {
        "hidden_states": latents,
        "timestep": times[:, None] * torch.ones(18) if per_token else times,
        "encoder_hidden_states": torch.randn(2, 512, 32, generator=generator).to(module.dtype),
        "encoder_hidden_states_image": None if clip is None else clip.to(module.dtype),
    }


def call(module: WanTransformer3DModel, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return module(**given, return_dict=False)[0]


def installed(module: WanTransformer3DModel) -> WanTransformer3DModel:
    ours = deepcopy(module)
    install(COMPONENT, ours)
    return ours


def holder(module: WanTransformer3DModel) -> Holder:
    return module.blocks[0].attn1.processor.holder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("image", "per_token"), [(False, False), (False, True), (True, False)])
def test_processor_and_blocks_are_diffusers_bit_for_bit_with_their_gradients(
    image: bool, per_token: bool, dtype: torch.dtype
) -> None:
    theirs = network(image=image, dtype=dtype)
    ours = installed(theirs)
    given = inputs(theirs, per_token=per_token)
    results = [call(module, given) for module in (ours, theirs)]
    assert torch.equal(*results)
    for result in results:
        result.float().square().sum().backward()
    gradients = [dict(module.named_parameters()) for module in (ours, theirs)]
    for name in gradients[0]:
        mine, reference = (one[name].grad for one in gradients)
        assert (mine is None and reference is None) or torch.equal(mine, reference), name


def test_another_attention_is_called_and_agrees_within_rounding() -> None:
    module = installed(network())
    given = inputs(module)
    with torch.no_grad():
        usual = call(module, given)
        for name in ("math", "flash"):
            with bound(module, name, "plain"):
                assert holder(module).choice.attend is getattr(attention, {"math": "plain"}.get(name, name))
                other = call(module, given)
            assert torch.allclose(other, usual, rtol=1e-4, atol=1e-5)
        with bound(module, "math", "plain"):
            assert not torch.equal(call(module, given), usual)  # so that the choice is known to arrive
        assert torch.equal(call(module, given), usual)


def counting(counts: dict[str, int]) -> Choice:
    def count(name: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counted(*arguments: object) -> torch.Tensor:
            counts[name] = counts.get(name, 0) + 1
            return function(*arguments)

        return counted

    return Choice(
        count("attend", attention.sdpa), count("norm", plain.adaptive_norm), count("rotary", plain.norm_rotary)
    )


def test_every_norm_and_every_attention_of_every_block_is_the_choices() -> None:
    module, counts = installed(network(image=True)), {}
    with holder(module).bound(counting(counts)):
        call(module, inputs(module))
    # a block: norms before self-attention and feed-forward; q and k turned; self, text and image attention
    assert counts == {"norm": 2 * 2, "rotary": 2 * 2, "attend": 2 * 3}


def test_threads_with_different_choices_on_one_module_each_get_their_own() -> None:
    module = installed(network())
    given = inputs(module)
    with torch.no_grad():
        alone = {}
        for name in ("sdpa", "math"):
            with bound(module, name, "plain"):
                alone[name] = call(module, given)
    assert not torch.equal(alone["sdpa"], alone["math"])
    wrong: list[str] = []

    def work(name: str) -> None:
        with torch.no_grad():
            for _ in range(25):
                with bound(module, name, "plain"):
                    if not torch.equal(call(module, given), alone[name]):
                        wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("sdpa", "math") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []


def test_calls_of_one_choice_run_side_by_side_and_of_another_wait() -> None:
    held, usual, other = Holder(), choice_of("sdpa", "plain"), choice_of("math", "plain")
    both, entered = threading.Barrier(2, timeout=10), threading.Event()

    def same_choice() -> None:
        with held.bound(usual):
            both.wait()

    def another() -> None:
        with held.bound(other):
            assert held.choice is other
            entered.set()

    first, second = threading.Thread(target=same_choice), threading.Thread(target=another)
    with held.bound(usual):
        first.start()
        both.wait()  # both are inside
        second.start()
        assert not entered.wait(0.1)
        assert held.choice is usual
    assert entered.wait(10)
    first.join(10), second.join(10)
    assert held.choice is usual


def test_a_failing_call_gives_the_module_back() -> None:
    module = installed(network())
    with pytest.raises(RuntimeError), bound(module, "math", "plain"):
        call(module, inputs(module) | {"encoder_hidden_states": torch.ones(2, 512, 7)})
    assert holder(module).choice is choice_of(*DEFAULT)


def test_a_copied_module_has_a_holder_of_its_own() -> None:
    module = installed(network())
    copied = deepcopy(module)
    assert holder(copied) is not holder(module)
    assert {id(block.attn1.processor.holder) for block in copied.blocks} == {id(holder(copied))}
    assert all(block.forward.args[0] is block for block in copied.blocks)
    assert all(block.forward.keywords["holder"] is holder(copied) for block in copied.blocks)


def test_a_module_that_was_not_prepared_refuses_choices_and_computes_otherwise() -> None:
    module = network()
    given = inputs(module)
    arguments = (given["hidden_states"], given["timestep"], given["encoder_hidden_states"])
    assert torch.equal(velocity(module, *arguments), call(module, given))
    with pytest.raises(BackendError, match="not prepared for a choice of kernels: 'attention math, kernels plain'"):
        velocity(module, *arguments, attention="math")


def test_requests_choose_and_their_results_say_so(ask: Callable) -> None:
    loaded, usual = ask("t2v", output="latents")
    other = loaded.request("a red fox", attention="math", **(media_for("t2v") | {"output": "latents"}))
    assert (usual.attention, usual.kernels) == DEFAULT
    results = {request.attention: loaded.run(request) for request in (usual, other)}
    assert not torch.equal(results["sdpa"].latents, results["math"].latents)
    assert torch.allclose(results["sdpa"].latents, results["math"].latents, atol=1e-3)
    for name, result in results.items():
        record = result.record["request"]
        assert (record["attention"], record["kernels"]) == (name, "plain")


def test_a_card_may_choose_for_its_requests_and_a_request_otherwise(ask: Callable) -> None:
    loaded, _ = ask("t2v")
    card = derive(
        loaded.card, defaults={"text_to_video": {**loaded.card.defaults["text_to_video"], "attention": "math"}}
    )
    assert resolve(card, prompt="").attention == "math"
    assert resolve(card, prompt="", attention="flash").attention == "flash"
    with pytest.raises(RequestError, match="attention must be text"):
        resolve(card, prompt="", attention=3)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"attention": "fa3"}, r"attention not available on cpu \(needs cuda\): 'fa3'; choices: sdpa, math, flash"),
        ({"attention": "quick"}, "unknown attention: 'quick'"),
        ({"kernels": "fused"}, r"kernels not available on cpu \(adaptive_norm needs cuda\): 'fused'; choices: plain"),
    ],
)
def test_what_the_device_lacks_is_refused_before_weights_are_read(
    choice: dict[str, str], message: str, checkpoint: Callable
) -> None:
    store = Store()
    model = api.load(checkpoint("t2v"), device="cpu", store=store)
    with pytest.raises(BackendError, match=message):
        model.request("a fox", **choice)
    request = replace(model.request("a fox"), **choice)
    with pytest.raises(BackendError, match=message):
        Job(model.instance, request)
    with pytest.raises(BackendError, match=message):
        model.run(request)
    assert len(store) == 0


def test_float8_is_refused_on_the_cpu_before_weights_are_read(checkpoint: Callable) -> None:
    card = catalog.find(str(checkpoint("t2v")))
    eight = derive(
        card,
        components={"transformer": replace(card.components["transformer"], dtype="float8")},
        recipe=replace(card.recipe, precision=("float32", "bfloat16", "float8")),
    )
    with pytest.raises(
        BackendError, match=r"precision not available on cpu \(needs cuda\): 'float8'; choices: float32"
    ):
        Instance(eight, catalog.loops(eight), Store(), device="cpu", locate=catalog.locate)


def test_a_family_that_offers_no_choice_refuses_one(ask: Callable) -> None:
    loaded, request = ask("t2v")
    plainly = Instance(loaded.card, loaded.instance.loops, Store(), device="cpu", locate=catalog.locate)
    with pytest.raises(BackendError, match="family wan run under torch's own choice of kernels alone"):
        Job(plainly, replace(request, attention="math"))


def test_two_instances_and_plain_pipelines_do_not_disturb_each_other(checkpoint: Callable) -> None:
    folder = checkpoint("t2v")
    pipeline = tiny.reference(folder, "t2v")
    one, two = (loopwright.load(folder, device="cpu", store=Store()) for _ in range(2))
    given = {**media_for("t2v"), "output": "latents"}
    asked = {"sdpa": one.request("a fox", **given), "math": two.request("a fox", attention="math", **given)}

    def reference() -> torch.Tensor:
        del_task = {name: value for name, value in media_for("t2v").items() if name not in ("task", "seed")}
        generator = torch.Generator("cpu").manual_seed(3)
        return pipeline(prompt="a fox", generator=generator, output_type="latent", **del_task).frames

    before = reference()
    first = {"sdpa": run(one.instance, asked["sdpa"]), "math": run(two.instance, asked["math"])}
    jobs = [Job(one.instance, asked["sdpa"]), Job(two.instance, asked["math"])]
    while not all(job.ended for job in jobs):
        for job in jobs:
            job.step()
    assert torch.equal(reference(), before)
    assert torch.equal(first["sdpa"]["latents"], before)
    assert not torch.equal(first["math"]["latents"], before)
    for job, name in zip(jobs, first, strict=True):
        assert same(job.output, first[name])
    assert isinstance(pipeline.transformer.blocks[0].attn1.processor, WanAttnProcessor)
    assert isinstance(one.instance.part("transformer").blocks[0].attn1.processor, Processor)


def test_float8_is_the_feed_forward_layers_and_nothing_else() -> None:
    theirs = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=24, in_channels=16, out_channels=16, text_dim=32, freq_dim=32,
        ffn_dim=64, num_layers=2, rope_max_seq_len=32,
    ).to(torch.bfloat16)  # fmt: skip
    ours = deepcopy(theirs)
    install(replace(COMPONENT, dtype="float8"), ours)
    assert ours.dtype == torch.bfloat16  # what its inputs are cast to
    before, after = dict(theirs.named_parameters()), dict(ours.named_parameters())
    assert {name for name in after if name not in before or not torch.equal(after[name], before[name])} == {
        f"blocks.{i}.ffn.{layer}.{what}" for i in range(2) for layer in ("up", "down") for what in ("weight", "bias")
    }
    eight = {name for name, parameter in after.items() if parameter.dtype == torch.float8_e4m3fn}
    assert eight == {f"blocks.{i}.ffn.{layer}.weight" for i in range(2) for layer in ("up", "down")}


def test_published_checkpoints_may_run_in_float8_and_small_ones_may_not(checkpoint: Callable) -> None:
    assert all("float8" in card.recipe.precision for card in wan.KNOWN)
    assert "float8" not in catalog.find("loopwright/tiny-wan").recipe.precision
    assert "float8" not in catalog.find(str(checkpoint("t2v"))).recipe.precision
