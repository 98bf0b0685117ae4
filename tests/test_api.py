"""The Python API: what goes in as arrays or paths comes out as pixels, events and a record that repeats it."""

import asyncio
import gc
import json
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import loopwright
import tiny
from loopwright import api, media
from loopwright.api import Model, Result
from loopwright.engine.events import Artifact, Cancelled, Done, Queued, Started, Stepped
from loopwright.engine.instance import Store
from loopwright.engine.job import Job
from loopwright.engine.scheduler import Scheduler
from loopwright.errors import CapacityError, CardError, MediaError, ModelError, RequestError, WeightsError
from support import IMAGE, VIDEO, finished, media_for, run

SMALL = media_for("t2v")


@pytest.fixture
def fresh(checkpoint: Callable) -> Model:
    """A model whose weights may be changed."""
    return loopwright.load(checkpoint("t2v"), device="cpu")


def test_one_seed_gives_the_latents_and_frames_of_diffusers_with_a_cpu_generator(model, checkpoint) -> None:
    result = model("t2v").generate("a red fox", height=32, width=32, num_frames=9, num_inference_steps=3, seed=7)
    pipeline = tiny.reference(checkpoint("t2v"), "t2v")
    for output in ("latent", "np"):
        theirs = pipeline("a red fox", height=32, width=32, num_frames=9, num_inference_steps=3, output_type=output,
                          generator=torch.Generator("cpu").manual_seed(7)).frames  # fmt: skip
        if output == "latent":
            assert torch.equal(result.latents, theirs)
        else:
            np.testing.assert_array_equal(result.video, (theirs[0] * 255).round().astype(np.uint8))


def test_a_result_has_video_image_latents_request_seconds_and_record(model) -> None:
    result = model("t2v").generate("a red fox", **SMALL)
    assert result.video.shape == (9, 32, 32, 3) and result.video.dtype == np.uint8
    np.testing.assert_array_equal(result.image, result.video[0])
    assert result.latents.shape == (1, 16, 3, 4, 4) and result.latents.dtype == torch.float32
    assert (result.request.prompt, result.request.seed) == ("a red fox", 3)
    assert 0 < result.seconds < 60


def test_the_same_request_gives_the_same_result_and_a_missing_seed_another_one(model) -> None:
    loaded = model("t2v")
    first, second = (loaded.generate("a red fox", **SMALL) for _ in range(2))
    assert torch.equal(first.latents, second.latents) and first.record == second.record
    unseeded = {name: value for name, value in SMALL.items() if name != "seed"}
    drawn = [loaded.generate("a red fox", **unseeded, output="latents") for _ in range(2)]
    assert not torch.equal(drawn[0].latents, drawn[1].latents)
    again = loaded.generate("a red fox", **unseeded, output="latents", seed=drawn[0].request.seed)
    assert torch.equal(again.latents, drawn[0].latents)


def test_the_record_holds_what_repeats_the_result_as_json(model, checkpoint) -> None:
    loaded = model("t2v", "unipc")
    record = loaded.generate("一只狐狸", **SMALL, output="latents").record
    assert json.loads(json.dumps(record)) == record
    assert record["loopwright"] == loopwright.__version__
    assert record["model"] == str(checkpoint("t2v", "unipc")) and record["card"] == loaded.card.digest
    assert (record["device"], record["sampler"], record["revision"]) == ("cpu", "unipc", None)
    assert record["dtypes"] == {"text_encoder": "float32", "transformer": "float32", "vae": "float32"}
    asked = record["request"]
    assert asked["prompt"] == "一只狐狸"
    repeated = loaded.generate(**{k: v for k, v in asked.items() if k not in ("model", "image", "video")})
    assert repeated.record == record


@pytest.mark.parametrize("suffix", [".mp4", ".gif", ".png", ".safetensors"])
def test_a_saved_file_carries_the_record(suffix: str, model, tmp_path: Path) -> None:
    frames = 1 if suffix == ".png" else 9
    result = model("t2v").generate("a fox", **(SMALL | {"num_frames": frames}))
    path = result.save(tmp_path / f"fox{suffix}")
    assert path == tmp_path / f"fox{suffix}" and path.stat().st_size > 0
    assert api.read_record(path) == result.record
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_saved_latents_are_the_results(model, tmp_path: Path) -> None:
    result = model("t2v").generate("a fox", **SMALL, output="latents")
    assert torch.equal(load_file(result.save(str(tmp_path / "x.safetensors")))["latents"], result.latents)


def test_a_file_without_a_record_says_so(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    (tmp_path / "y.safetensors").write_bytes(b"garbage")
    for name in ("x", "y", "none"):
        with pytest.raises(MediaError, match="carries no record"):
            api.read_record(tmp_path / f"{name}.safetensors")


def test_latents_alone_have_no_pixels_and_say_how_to_get_them(model, tmp_path: Path) -> None:
    result = model("t2v").generate("a fox", **SMALL, output="latents")
    assert result.video is None
    for use in (lambda: result.image, lambda: result.save(tmp_path / "x.mp4")):
        with pytest.raises(
            RequestError, match=r"only latents were asked for: 'latents'; choices: video; generate with"
        ):
            use()
    assert not list(tmp_path.iterdir())


def test_a_format_that_is_not_written_is_refused(model, tmp_path: Path) -> None:
    result = model("t2v").generate("a fox", **(SMALL | {"num_frames": 1}))
    with pytest.raises(MediaError, match=r"\.xyz"):
        result.save(tmp_path / "fox.xyz")
    assert not list(tmp_path.iterdir())


def test_a_listener_hears_every_event_of_a_generation(model) -> None:
    events: list[object] = []
    model("t2v").generate("a fox", **SMALL, listener=events.append)
    assert isinstance(events[0], Queued) and isinstance(events[-1], Done)
    assert {type(event) for event in events} == {Queued, Started, Stepped, Artifact, Done}


def test_an_image_may_be_an_array_a_path_or_frames(model, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    Image.fromarray(IMAGE).save(path)
    loaded = model("i2v")
    given = {name: value for name, value in media_for("i2v").items() if name != "image"} | {"output": "latents"}
    ready = loaded.request("a fox", **given, image=IMAGE).image
    results = [loaded.generate("a fox", **given, image=image) for image in (IMAGE, path, str(path), ready)]
    assert all(torch.equal(result.latents, results[0].latents) for result in results)
    assert [result.record["request"]["image"] for result in results] == ["", str(path), str(path), ""]
    assert len({result.record["request"]["image_digest"] for result in results}) == 1


def test_a_video_may_be_an_array_or_a_path(model, tmp_path: Path) -> None:
    path = tmp_path / "video.mp4"
    media.write(path, np.repeat(np.repeat(VIDEO, 2, 1), 2, 2)[:, :64, :64], fps=16, metadata={})
    pixels, _ = media.read_video(path)
    given = {name: value for name, value in media_for("v2v").items() if name != "video"} | {"output": "latents"}
    loaded = model("v2v")
    results = [loaded.generate("a fox", **given, video=video) for video in (pixels, path)]
    assert torch.equal(results[0].latents, results[1].latents)
    assert results[1].record["request"]["video"] == str(path)
    assert results[0].request.num_frames == 9


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        (
            "image",
            IMAGE.astype(np.float32),
            r"an image must be a path or uint8 pixels \[H, W, 3\]: 'float32 \[40, 50, 3\]'",
        ),
        ("image", IMAGE[..., 0], r"an image must be .*'uint8 \[40, 50\]'"),
        ("image", IMAGE[..., :2], r"an image must be .*'uint8 \[40, 50, 2\]'"),
        ("image", VIDEO, r"an image must be .*'uint8 \[9, 40, 50, 3\]'"),
        ("video", IMAGE, r"a video must be .*\[T, H, W, 3\]: 'uint8 \[40, 50, 3\]'"),
        ("video", VIDEO.astype(np.int64), r"a video must be .*'int64"),
    ],
)
def test_pixels_of_another_kind_are_refused_with_what_they_are(name: str, value: np.ndarray, match: str, model) -> None:
    with pytest.raises(RequestError, match=match):
        model("t2v").generate("a fox", **{name: value})


def test_a_strided_array_is_taken_as_it_looks(model) -> None:
    loaded = model("i2v")
    given = {name: value for name, value in media_for("i2v").items() if name != "image"}
    flipped = loaded.request("a fox", **given, image=IMAGE[:, ::-1])
    assert flipped.image == loaded.request("a fox", **given, image=np.ascontiguousarray(IMAGE[:, ::-1])).image


def test_a_missing_media_file_is_a_media_error(model, tmp_path: Path) -> None:
    with pytest.raises(MediaError, match=r"none\.png"):
        model("i2v").generate("a fox", image=tmp_path / "none.png")


async def collect(model: Model, **given: object) -> list[object]:
    return [item async for item in model.stream("a red fox", **given)]


def test_a_stream_gives_the_events_and_then_the_result(model) -> None:
    items = asyncio.run(collect(model("t2v"), **SMALL))
    assert isinstance(items[0], Queued) and isinstance(items[-2], Done) and isinstance(items[-1], Result)
    heard: list[object] = []
    expected = model("t2v").generate("a red fox", **SMALL, listener=heard.append)
    assert [type(item) for item in items[:-1]] == [type(event) for event in heard]
    assert torch.equal(items[-1].latents, expected.latents) and items[-1].record == expected.record
    np.testing.assert_array_equal(items[-1].video, expected.video)


def test_streams_side_by_side_give_what_each_gives_alone(model) -> None:
    async def all_of_them() -> list[list[object]]:
        return await asyncio.gather(*(collect(model("t2v"), **(SMALL | {"seed": seed})) for seed in range(3)))

    for seed, items in enumerate(asyncio.run(all_of_them())):
        assert torch.equal(items[-1].latents, model("t2v").generate("a red fox", **(SMALL | {"seed": seed})).latents)


def count_forwards(model: Model) -> list[int]:
    calls: list[int] = []
    model.instance.part("transformer").register_forward_pre_hook(lambda *seen: calls.append(1))
    return calls


@pytest.mark.parametrize("closing", ["explicitly", "by the collector", "by an error"])
def test_leaving_a_stream_cancels_the_job_at_the_next_step(closing: str, fresh: Model, monkeypatch) -> None:
    calls, jobs, ended = count_forwards(fresh), [], []
    made = Job.__init__
    monkeypatch.setattr(Job, "__init__", lambda self, *a, **k: (made(self, *a, **k), jobs.append(self))[0])
    emit = Job._emit
    monkeypatch.setattr(Job, "_emit", lambda self, e: (emit(self, e), ended.append(type(e)))[0])

    async def leave() -> None:
        stream = fresh.stream("a fox", **(SMALL | {"num_inference_steps": 200, "guidance_scale": 1.0}))
        if closing == "by the collector":
            async for event in stream:
                if isinstance(event, Stepped) and event.stage == "denoise":
                    break
            del stream
            gc.collect()
            while not ended or ended[-1] is not Cancelled:
                await asyncio.sleep(0.01)
            return
        async with aclosing(stream):
            async for event in stream:
                if isinstance(event, Stepped) and event.stage == "denoise":
                    if closing == "by an error":
                        raise KeyError("the client is gone")
                    break

    try:
        asyncio.run(asyncio.wait_for(leave(), 30))
    except KeyError:
        assert closing == "by an error"
    assert 1 <= len(calls) < 100
    assert jobs[0].status == "cancelled" and jobs[0].slots == {} and jobs[0].state is None
    assert ended[-1] is Cancelled


def test_a_stream_that_fails_raises_the_error(fresh: Model) -> None:
    with torch.no_grad():
        for parameter in fresh.instance.part("transformer").parameters():
            parameter.fill_(float("nan"))
    items: list[object] = []

    async def failing() -> None:
        async for item in fresh.stream("a fox", **SMALL):
            items.append(item)

    with pytest.raises(ModelError, match="denoising step 1 of 3"):
        asyncio.run(failing())
    assert items and not isinstance(items[-1], Result)


def test_a_stream_of_an_impossible_request_raises_before_anything_runs(fresh: Model) -> None:
    with pytest.raises(RequestError, match="height must be a multiple"):
        asyncio.run(collect(fresh, height=17))
    assert len(fresh.instance.store) == 0


def test_what_ended_a_generation_is_raised(fresh: Model) -> None:
    with torch.no_grad():
        for parameter in fresh.instance.part("vae").parameters():
            parameter.fill_(float("inf"))
    with pytest.raises(ModelError, match="frames, step 1"):
        fresh.generate("a fox", **SMALL)


def test_the_result_of_a_job_that_has_not_finished_is_refused(model) -> None:
    loaded = model("t2v")
    job = Job(loaded.instance, loaded.request("a fox", **SMALL))
    with pytest.raises(RequestError, match="the job has no result: 'queued'"):
        loaded.result(job)
    job.cancel()
    job.step()
    with pytest.raises(RequestError, match="the job has no result: 'cancelled'"):
        loaded.result(job)


def test_threads_that_generate_at_once_give_the_serial_results(model) -> None:
    from concurrent.futures import ThreadPoolExecutor

    seeds = range(4)
    loaded = model("t2v")  # the checkpoint is built here, not by four threads at once from one random state
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda seed: loaded.generate("a fox", **(SMALL | {"seed": seed})), seeds))
    for seed, result in zip(seeds, found, strict=True):
        expected = loaded.generate("a fox", **(SMALL | {"seed": seed}))
        assert torch.equal(result.latents, expected.latents)
        np.testing.assert_array_equal(result.video, expected.video)


def test_a_model_can_be_run_on_a_complete_request(model) -> None:
    loaded = model("t2v")
    request = loaded.request("a red fox", **SMALL)
    assert torch.equal(loaded.run(request).latents, loaded.generate("a red fox", **SMALL).latents)
    assert torch.equal(
        loaded.run(replace(request, seed=8)).latents, run(loaded.instance, replace(request, seed=8))["latents"]
    )


def test_loading_reads_no_weights_and_use_reads_what_it_needs(checkpoint) -> None:
    store = Store()
    loaded = loopwright.load(checkpoint("t2v"), device="cpu", store=store)
    loaded.request("a fox", **SMALL)
    assert len(store) == 0
    loaded.generate("a fox", **SMALL, output="latents")
    assert len(store) == 3  # no autoencoder
    loaded.generate("a fox", **SMALL)
    assert len(store) == 4


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"device": "tpu"}, RequestError, r"no such device: 'tpu'; choices: auto, .*cpu"),
        ({"dtype": "float4"}, RequestError, r"unknown dtype: 'float4'; choices: float32, bfloat16"),
        ({"dtype": {"vae": "float8"}}, CardError, r"'vae' has a precision for generators alone: 'float8'"),
        ({"dtype": {"unet": "float32"}}, RequestError, r"no such component.*: 'unet'; choices: .*transformer"),
        (
            {"dtype": {"tokenizer": "float32"}},
            RequestError,
            r"no such component.*: 'tokenizer'; choices: .*transformer",
        ),
        (
            {"dtype": "float16"},
            CardError,
            r"a precision its weights do not assume: 'float16'; choices: float32, bfloat16",
        ),
        ({"sampler": "ddim"}, RequestError, r"unknown sampler: 'ddim'; choices: euler, unipc"),
        ({"revision": "main"}, WeightsError, r"a local folder has no revisions: 'main'"),
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_refused_before_weights_are_read(options, error, match, checkpoint) -> None:
    store = Store()
    with pytest.raises(error, match=match):
        loopwright.load(checkpoint("t2v"), **({"device": "cpu", "store": store} | options))
    assert len(store) == 0


@pytest.mark.parametrize("name", ["loopwright/none", "./no/such/folder"])
def test_a_model_that_is_not_there_is_a_weights_error(name: str) -> None:
    with pytest.raises(WeightsError, match="choices: loopwright/tiny-wan"):
        loopwright.load(name)


def test_precision_and_sampler_by_name_are_in_the_card_the_record_and_the_weights(checkpoint) -> None:
    loaded = loopwright.load(checkpoint("a14b"), device="cpu", dtype="bfloat16", sampler="unipc")
    assert {name: c.dtype for name, c in loaded.card.components.items() if name.startswith("transformer")} == {
        "transformer": "bfloat16", "transformer_2": "bfloat16"}  # fmt: skip
    assert loaded.card.components["vae"].dtype == "float32"
    assert loaded.instance.part("transformer_2").dtype == torch.bfloat16
    result = loaded.generate("a fox", **media_for("a14b"), output="latents")
    assert result.latents.dtype == torch.float32
    assert result.record["sampler"] == "unipc" and result.record["dtypes"]["transformer"] == "bfloat16"
    one = loopwright.load(checkpoint("t2v"), device="cpu", dtype={"vae": "bfloat16"})
    assert (one.card.components["vae"].dtype, one.card.components["transformer"].dtype) == ("bfloat16", "float32")


def test_a_finished_job_of_a_runner_has_a_result(model) -> None:
    loaded = model("t2v")
    job = Job(loaded.instance, loaded.request("a fox", **SMALL))
    finished(job)
    assert torch.equal(loaded.result(job).latents, loaded.generate("a fox", **SMALL).latents)


def test_a_request_of_another_model_is_refused(ask) -> None:
    model, request = ask("t2v")
    with pytest.raises(RequestError, match="of another model: 'other'; choices: t2v-euler"):
        model.run(replace(request, model="other"))


def test_a_shift_no_solver_can_follow_is_a_request_error(ask) -> None:
    model, request = ask("t2v", "unipc", flow_shift=1e6, num_inference_steps=4)
    with pytest.raises(
        RequestError, match=r"unipc solver has no steps for flow_shift 1000000.0.*: 4; give a flow_shift nearer to 1"
    ):
        model.run(request)


def test_a_request_the_card_cannot_make_is_refused_though_it_is_complete(ask) -> None:
    model, request = ask("t2v")
    with pytest.raises(RequestError, match=r"height must be a multiple of 16: 63; nearest: 48 or 64"):
        model.run(replace(request, height=63))


def test_running_out_of_memory_names_the_stage_and_the_way_out(ask, monkeypatch) -> None:
    from loopwright.loops import denoise

    def huge(parts, **arguments):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 40 bytes")

    monkeypatch.setattr(denoise, "denoise_step", huge)
    model, request = ask("t2v")
    with pytest.raises(ModelError, match=r"out of memory in stage denoise .*; ask for a smaller size"):
        model.run(request)


def test_a_local_model_and_its_media_are_recorded_so_that_any_folder_finds_them(
    checkpoint, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(checkpoint("ti2v").parent)
    model = loopwright.load(checkpoint("ti2v").name, device="cpu")
    assert model.source == str(checkpoint("ti2v").resolve())
    Image.fromarray(IMAGE).save(tmp_path / "first.png")
    monkeypatch.chdir(tmp_path)
    request = model.request("a fox", image="first.png", height=32, width=32, num_frames=5)
    assert request.image.source == str(tmp_path / "first.png")


def test_requests_run_together_give_what_each_gives_alone(ask) -> None:
    model, request = ask("t2v", mode="fixed", rows=3)
    requests = [replace(request, seed=seed) for seed in range(4)]
    alone = [model.run(request) for request in requests]
    results = {result.request.seed: result for result in model.run_all(requests)}
    assert sorted(results) == [0, 1, 2, 3]
    assert all(np.array_equal(results[seed].video, one.video) for seed, one in enumerate(alone))


def test_a_request_that_fails_costs_no_other_its_result_and_is_told_of_at_the_end(ask) -> None:
    model, request = ask("t2v", mode="fixed", rows=3)
    jobs: list[str] = []

    def listen(event: object) -> None:
        if isinstance(event, Queued):
            jobs.append(event.job)
        if isinstance(event, Stepped) and event.stage == "denoise" and event.job == jobs[1]:
            raise RuntimeError("planned")

    done = []
    with pytest.raises(RuntimeError, match="planned"):
        for result in model.run_all([replace(request, seed=seed) for seed in range(4)], listener=listen):
            done.append(result.request.seed)
    assert sorted(done) == [0, 2, 3]


def test_who_stops_taking_results_ends_the_other_requests(ask) -> None:
    model, request = ask("t2v")
    heard: list[object] = []
    results = model.run_all([replace(request, seed=seed) for seed in range(3)], listener=heard.append)
    assert next(results).request.seed == 0
    results.close()
    assert [type(event) for event in heard if isinstance(event, (Done, Cancelled))] == [Done, Cancelled, Cancelled]


# --- what is refused before anything runs


def test_fixed_mode_wants_its_number_of_rows(model):
    with pytest.raises(RequestError, match=r"fixed mode needs its number of rows a call; give rows=; Model.rows"):
        model("t2v").request("a", mode="fixed")


def test_requests_are_checked_all_before_one_runs(model):
    good = model("t2v").request("a", **SMALL | {"num_inference_steps": 1, "output": "latents"})
    for bad, said in (("a fox", "not a request"), (replace(good, model="other"), "of another model")):
        with pytest.raises(RequestError, match=said):
            model("t2v").run_all([good, bad])


def test_one_that_cannot_be_queued_ends_those_queued_before_it(model, monkeypatch):
    events, submit = [], Scheduler.submit

    def full(self, job, **options):
        if job.request.seed == 2:
            raise CapacityError("no room")
        return submit(self, job, **options)

    monkeypatch.setattr(Scheduler, "submit", full)
    requests = [
        model("t2v").request("a", **SMALL | {"num_inference_steps": 1, "output": "latents", "seed": seed})
        for seed in (1, 2)
    ]
    with pytest.raises(CapacityError, match="no room"):
        model("t2v").run_all(requests, listener=events.append)
    assert [type(event).__name__ for event in events] == ["Queued", "Queued", "Cancelled"]


@pytest.mark.parametrize("rows", [0, -1, True, 1.5, "4"])
def test_rows_are_whole_numbers(model, rows):
    with pytest.raises(RequestError, match="rows must be a whole number of at least 1"):
        model("t2v").scheduler(rows=rows)
    with pytest.raises(RequestError, match="limit must be a whole number of at least 1"):
        model("t2v").rows(model("t2v").request("a"), limit=rows)
