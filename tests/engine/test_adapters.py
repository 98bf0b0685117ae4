"""Models with adapters: what diffusers computes, the base where they count nothing, and never one for the other."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

import loopwright
import tiny
from loopwright import catalog
from loopwright.api import Model
from loopwright.backends.compile import why_not_compile
from loopwright.card import derive
from loopwright.engine.graphs import Graphs
from loopwright.engine.instance import Instance, Store
from loopwright.engine.job import Job
from loopwright.engine.saved import restore, save
from loopwright.engine.scheduler import Scheduler
from loopwright.engine.sizes import Sizes
from loopwright.errors import BackendError, RequestError, StateError, WeightsError
from loopwright.weights import lora
from lora_files import EVERY, in_blocks, matrices
from standin_capture import StandIns
from support import IMAGE, media_for, relative

OTHERS = ("proj_out", "condition_embedder.time_proj", "condition_embedder.text_embedder.linear_1")
PARTS = {"t2v": EVERY, "a14b": EVERY, "ti2v": EVERY, "i2v": (*EVERY, "attn2.add_k_proj", "attn2.add_v_proj")}


@pytest.fixture(scope="module")
def file(checkpoint: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`file(kind, seed)`: an adapter of many layers of that kind's transformer."""

    def write(kind: str = "t2v", seed: int = 0) -> Path:
        path = tmp_path_factory.mktemp("adapters") / f"{kind}-{seed}.safetensors"
        transformer = tiny.reference(checkpoint(kind), kind).transformer
        names = [*in_blocks(PARTS[kind]), *OTHERS]
        return lora.save(path, matrices(transformer, names, seed=seed), alpha=3)

    return write


@pytest.fixture
def load(checkpoint: Callable) -> Callable[..., Model]:
    def loaded(*adapters: str | Path, kind: str = "t2v", **options: object) -> Model:
        return loopwright.load(checkpoint(kind), device="cpu", lora=adapters, **({"store": Store(0)} | options))

    return loaded


def latents(model: Model, kind: str = "t2v", **changes: object) -> torch.Tensor:
    return model.generate("a fox", **(media_for(kind) | {"output": "latents"} | changes)).latents


def reference(checkpoint: Callable, kind: str, *files: tuple[Path, float], second: Path | None = None) -> torch.Tensor:
    """The latents of diffusers' own pipeline with adapters that it loaded itself."""
    pipeline = tiny.reference(checkpoint(kind), kind)
    for index, (path, _) in enumerate(files):
        pipeline.load_lora_weights(path, adapter_name=f"a{index}")
    if second is not None:
        pipeline.load_lora_weights(second, load_into_transformer_2=True)
    if any(scale != 1 for _, scale in files):
        pipeline.set_adapters([f"a{index}" for index in range(len(files))], [scale for _, scale in files])
    given = {name: value for name, value in media_for(kind).items() if name not in ("task", "seed", "image")}
    if "image" in media_for(kind):
        given["image"] = Image.fromarray(IMAGE)
    generator = torch.Generator("cpu").manual_seed(media_for(kind)["seed"])
    return pipeline(prompt="a fox", generator=generator, output_type="latent", **given).frames


# --- the same bits as diffusers, or as the base


@pytest.mark.parametrize("kind", ["t2v", "i2v", "ti2v"])
def test_latents_are_those_of_diffusers_with_the_same_adapter(
    kind: str, checkpoint: Callable, file: Callable, load: Callable
) -> None:
    adapter = file(kind)
    ours = latents(load(adapter, kind=kind), kind)
    assert torch.equal(ours, reference(checkpoint, kind, (adapter, 1.0)))
    assert relative(ours, latents(load(kind=kind), kind)) > 1e-3


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_several_adapters_count_by_their_scales(checkpoint: Callable, file: Callable, load: Callable) -> None:
    first, second = file(seed=1), file(seed=2)
    ours = latents(load(f"{first}:0.7", f"{second}:-0.4"))
    assert torch.equal(ours, reference(checkpoint, "t2v", (first, 0.7), (second, -0.4)))
    assert not torch.equal(ours, latents(load(first, second)))


def test_each_expert_has_adapters_of_its_own(checkpoint: Callable, file: Callable, load: Callable) -> None:
    high, low = file("a14b", 1), file("a14b", 2)
    model = load(f"transformer={high}", f"transformer_2={low}", kind="a14b")
    asked = {"guidance_scale": 4.0, "num_inference_steps": 6}
    ours = latents(model, "a14b", **asked)
    pipeline = tiny.reference(checkpoint("a14b"), "a14b")
    pipeline.load_lora_weights(high)
    pipeline.load_lora_weights(low, load_into_transformer_2=True)
    given = {name: value for name, value in (media_for("a14b") | asked).items() if name not in ("task", "seed")}
    generator = torch.Generator("cpu").manual_seed(media_for("a14b")["seed"])
    theirs = pipeline(prompt="a fox", generator=generator, output_type="latent", **given).frames
    assert torch.equal(ours, theirs)
    swapped = load(f"transformer={low}", f"transformer_2={high}", kind="a14b")
    assert not torch.equal(latents(swapped, "a14b", **asked), ours)


def test_at_scale_0_it_is_the_base_bit_for_bit_and_the_same_module(file: Callable, load: Callable) -> None:
    store, adapter = Store(0), file()
    base, off, on = (load(*given, store=store) for given in ((), (f"{adapter}:0",), (adapter,)))
    assert torch.equal(latents(base), latents(off)) and not torch.equal(latents(base), latents(on))
    parts = [model.instance.part("transformer") for model in (base, off, on)]
    assert parts[0] is parts[1] and parts[0] is not parts[2]


@pytest.mark.parametrize("options", [{"memory": "low"}, {"dtype": "bfloat16"}], ids=str)
def test_where_weights_live_changes_nothing_and_precision_is_the_generators(
    options: dict[str, str], file: Callable, load: Callable
) -> None:
    adapter = file()
    with_it, without = load(adapter, **options), load(**options)
    transformer = with_it.instance.part("transformer")
    dtypes = {layer.base_layer.weight.dtype for layer in transformer.modules() if hasattr(layer, "lora_A")}
    assert dtypes >= {p.dtype for name, p in transformer.named_parameters() if "lora_" in name}
    ours = latents(with_it)
    assert not torch.equal(ours, latents(without))
    if options.get("memory"):
        assert torch.equal(ours, latents(load(adapter)))


@pytest.mark.parametrize("mode", ["exact", "fixed", "throughput"])
def test_requests_of_models_that_share_a_store_do_not_mix(mode: str, file: Callable, load: Callable) -> None:
    store = Store()
    texts = ((), (file(seed=1),), (file(seed=2),), (f"{file(seed=1)}:0.5",))
    models = [load(*given, store=store) for given in texts]
    asked = media_for("t2v") | {"output": "latents", "mode": mode}
    asked |= {"rows": 2} if mode == "fixed" else {}
    alone = [latents(load(*given), mode=mode, **({"rows": 2} if mode == "fixed" else {})) for given in texts]
    scheduler = Scheduler()
    jobs = [scheduler.submit(Job(model.instance, model.request("a fox", **asked))) for model in models]
    scheduler.run()
    assert [job.error for job in jobs] == [None] * 4
    assert all(torch.equal(job.output["latents"], one) for job, one in zip(jobs, alone, strict=True))
    assert len({job.output["latents"].sum().item() for job in jobs}) == 4
    assert len({model.instance.origin("transformer") for model in models}) == 4
    assert len({id(model.instance.part("text_encoder")) for model in models}) == 1


def test_bindings_are_told_apart_by_content_and_scale(file: Callable, load: Callable, tmp_path: Path) -> None:
    adapter = file()
    read = lora.read(adapter)
    copied = lora.save(tmp_path / "copy.safetensors", read.tensors, alpha=read.alphas, layout="comfyui")
    bindings = [load(*given).instance.binding for given in ((), (adapter,), (f"{adapter}:0.5",), (file(seed=9),))]
    assert len(set(bindings)) == 4
    assert load(copied).instance.binding == load(adapter).instance.binding == bindings[1]


def test_captured_steps_are_the_adapters_own(file: Callable, load: Callable) -> None:
    store = Store()
    base, ours = load(store=store), load(file(), store=store)
    graphs = Graphs(StandIns())
    for model in (base, ours, base, ours):
        runner = Scheduler(execute=graphs)
        job = runner.submit(Job(model.instance, model.request("a fox", **media_for("t2v"))))
        runner.run()
        assert torch.equal(job.output["latents"], latents(model))
    assert graphs.replays > 0 and not graphs.breaks


# --- what belongs to it


def test_the_bytes_of_adapters_are_counted_before_they_are_loaded(file: Callable, load: Callable) -> None:
    base, ours = load(), load(file())
    extra = ours.instance._missing() - base.instance._missing()
    assert extra == lora.read(ours.instance.adapters[0].adapter.file).bytes > 0
    latents(ours), latents(base)
    assert ours.instance.store.loaded.bytes - base.instance.store.loaded.bytes == extra


def test_what_a_request_needs_counts_what_its_adapters_compute(
    checkpoint: Callable, load: Callable, tmp_path: Path
) -> None:
    transformer = tiny.reference(checkpoint("t2v"), "t2v").transformer
    made = matrices(transformer, ["blocks.0.attn1.to_q"], rank=2**14)
    wide = load(lora.save(tmp_path / "wide.safetensors", made, alpha=1))
    asked, sizes = media_for("t2v") | {"output": "latents"}, Sizes()
    needs = [sizes.need(model.instance, model.request("a fox", **asked)) for model in (load(), wide)]
    tokens = 3 * 2 * 2
    assert needs[1].peak > tokens * 2**14 * 4 > needs[0].peak and wide.instance.store.loaded.bytes == 0


def test_the_record_says_which_adapters_ran(file: Callable, load: Callable) -> None:
    adapter = file()
    model = load(f"{adapter}:0.5")
    assert model.record(model.request("a fox"))["lora"] == [
        {"component": "transformer", "file": str(adapter), "digest": lora.read(adapter).digest, "scale": 0.5}
    ]
    assert load().record(load().request("a fox"))["lora"] == []


def test_a_saved_job_continues_under_its_own_adapters_alone(file: Callable, load: Callable, tmp_path: Path) -> None:
    adapter = file()
    whole, model = latents(load(adapter)), load(adapter)
    job = Job(model.instance, model.request("a fox", **media_for("t2v"), output="latents"))
    while not (job.stage == 1 and job.index == 1):
        job.step()
    save(job, tmp_path / "job.safetensors")
    continued = restore(load(adapter).instance, tmp_path / "job.safetensors")
    while not continued.ended:
        continued.step()
    assert torch.equal(continued.output["latents"], whole)
    between = Job(model.instance, model.request("a fox", **media_for("t2v")))
    save(between, tmp_path / "between.safetensors")  # no step of it has run
    for other in (load(), load(f"{adapter}:0.5")):
        for name in ("job", "between"):
            with pytest.raises(StateError, match="ran with other adapters: 'transformer "):
                restore(other.instance, tmp_path / f"{name}.safetensors")


def test_changed_weights_are_the_component_with_its_adapters_and_no_other(file: Callable, load: Callable) -> None:
    store = Store()
    base, ours = (load(*given, store=store).instance for given in ((), (file(),)))
    ours.changed("transformer")
    assert (base.version("transformer"), ours.version("transformer")) == (1, 2)


# --- refused before weights are read


def test_an_adapter_of_another_model_is_refused(checkpoint: Callable, file: Callable) -> None:
    store = Store()
    with pytest.raises(WeightsError, match=r"i2v-0.safetensors: WanTransformer3DModel has no such layer: .*add_k_proj"):
        loopwright.load(checkpoint("t2v"), device="cpu", store=store, lora=file("i2v"))
    with pytest.raises(WeightsError, match=r"t2v-0.safetensors: the matrices of proj_out do not fit"):
        loopwright.load(checkpoint("ti2v"), device="cpu", store=store, lora=file("t2v"))
    with pytest.raises(RequestError, match="several experts"):
        loopwright.load(checkpoint("a14b"), device="cpu", store=store, lora=str(file("a14b")))
    assert len(store) == 0


def test_8_bit_layers_have_no_adapters(checkpoint: Callable, file: Callable) -> None:
    card = catalog.find(str(checkpoint("t2v")))
    eight = derive(
        card,
        components={"transformer": replace(card.components["transformer"], dtype="float8")},
        recipe=replace(card.recipe, precision=("float8",)),
    )

    def instance(text: str) -> Instance:
        uses, store = lora.uses([text], ("transformer",)), Store()
        return Instance(eight, catalog.loops(eight), store, device="meta", locate=catalog.locate, adapters=uses)

    with pytest.raises(BackendError, match="'transformer' has: 'float8'; choices: float32, bfloat16, float16"):
        instance(str(file()))
    assert instance(f"{file()}:0").binding.adapters == ""


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not_compile("cpu")), reason=f"inductor cannot compile here: {why_not_compile('cpu')}")
def test_compiled_blocks_run_their_adapters(file: Callable, load: Callable) -> None:
    torch._dynamo.reset()
    plain, compiled = (latents(load(file(), compile=each)) for each in (False, True))
    assert 0 < relative(compiled, plain) <= 1e-4 < relative(latents(load()), plain)
