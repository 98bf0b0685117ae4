"""Where components live changes no bit: who comes, who leaves, who may not, and what survives the moves."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch

import loopwright
from loopwright.api import Model
from loopwright.engine.instance import Instance, Store
from loopwright.engine.residence import Lease, Residence, Resident, Whole, choose, size_of, tensors_of
from loopwright.errors import BackendError, RequestError
from support import KINDS, run, same

GIB = 2**30


@dataclass
class Away:
    """A stand-in for a device of its own: what has not been brought there holds NaN, so that no op can use it."""

    module: torch.nn.Module
    exclusive: bool
    name: str
    log: list[str]
    kept: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._empty()

    def bring(self) -> None:
        self.log.append(f"+{self.name}")
        for tensor, data in self.kept.items():
            tensor.data = data

    def send(self) -> int:
        self.log.append(f"-{self.name}")
        return self._empty()

    def changed(self) -> None:
        self.log.append(f"!{self.name}")

    def _empty(self) -> int:
        for tensor in tensors_of(self.module):
            self.kept[tensor] = tensor.data
            tensor.data = torch.full_like(tensor.data, torch.nan if tensor.is_floating_point() else 0)
        return sum(map(size_of, self.kept.values()))


class Log(list[str]):
    """What moved, in order. Is a factory of homes that write here; `layered` ones may be used by one call at a time."""

    def __init__(self, layered: bool = True) -> None:
        super().__init__()
        self.layered = layered

    def home(self, module: torch.nn.Module, device: str, layered: bool) -> Away:
        name = {"UMT5EncoderModel": "text", "AutoencoderKLWan": "vae", "CLIPVisionModel": "image"}
        return Away(module, layered and self.layered, name.get(type(module).__name__, "expert"), self)

    @property
    def here(self) -> set[str]:
        """Who is on the device now."""
        return {name[1:] for i, name in enumerate(self) if name[0] == "+" and f"-{name[1:]}" not in self[i:]}


@pytest.fixture
def low(checkpoint: Callable) -> Callable[..., Model]:
    """A tiny model that keeps its weights on the host."""

    def load(kind: str, store: Store | None = None) -> Model:
        return loopwright.load(checkpoint(kind), device="cpu", memory="low", store=Store(0) if store is None else store)

    return load


# Bits


@pytest.mark.parametrize("kind", KINDS)
def test_low_gives_the_bits_of_high(kind: str, ask: Callable, low: Callable) -> None:
    high, request = ask(kind, "euler")
    model = low(kind)
    assert (high.instance.memory, model.instance.memory) == ("high", "low")
    assert same(run(model.instance, request), run(high.instance, request))


@pytest.mark.parametrize("kind", ["t2v", "i2v", "ti2v", "a14b"])
def test_no_step_runs_on_a_component_that_is_away(kind: str, ask: Callable, low: Callable) -> None:
    high, request = ask(kind, "euler")
    log = Log()
    model = low(kind, Store(0, homes=log.home))
    for _ in range(2):
        assert same(run(model.instance, request), run(high.instance, request))
    assert len(log.here) == 1


def test_experts_run_by_hooks_that_belong_to_their_module_alone(
    ask: Callable, low: Callable, checkpoint: Callable
) -> None:
    model, other = low("a14b"), loopwright.load(checkpoint("a14b"), device="cpu")
    for name in ("transformer", "transformer_2"):
        assert hooked(model.instance.part(name)) and not hooked(other.instance.part(name))
    assert not hooked(model.instance.part("vae")) and not hooked(model.instance.part("text_encoder"))
    high, request = ask("a14b", "euler")
    run(model.instance, request)
    assert same(run(other.instance, request), run(high.instance, request))


def test_every_block_is_fetched_at_every_forward(ask: Callable, low: Callable) -> None:
    """Bits alone would not tell: on a host that is the device, a hook that never ran gives the same."""
    model = low("t2v").instance
    transformer, calls = model.part("transformer"), {}
    for name, block in [("", transformer), *transformer.blocks.named_children()]:
        group = block._diffusers_hook.get_hook("group_offloading").group
        fetch = group.onload_
        group.onload_ = lambda name=name, fetch=fetch: (calls.update({name: calls.get(name, 0) + 1}), fetch())
    run(model, ask("t2v")[1])
    assert set(calls) == {"", "0", "1"} and set(calls.values()) == {6}  # three steps, each with and without the prompt


def hooked(module: torch.nn.Module) -> bool:
    return any(hasattr(part, "_diffusers_hook") for part in module.modules())


# Who comes and who leaves


def test_each_stage_brings_its_component_and_those_nobody_uses_leave(ask: Callable, low: Callable) -> None:
    log = Log()
    run(low("t2v", Store(0, homes=log.home)).instance, ask("t2v")[1])
    assert log == ["+text", "-text", "+expert", "-expert", "+vae"]


def test_one_expert_is_there_at_a_time(ask: Callable, low: Callable) -> None:
    log = Log()
    run(low("a14b", Store(0, homes=log.home)).instance, ask("a14b")[1])
    assert log == ["+text", "-text", "+expert", "-expert", "+expert", "-expert", "+vae"]


def test_high_brings_and_sends_nothing(checkpoint: Callable, ask: Callable) -> None:
    class Still(Away):
        def _empty(self) -> int:
            return 0

    log: list[str] = []
    store = Store(0, homes=lambda module, device, layered: Still(module, False, str(layered), log))
    model = loopwright.load(checkpoint("t2v"), device="cpu", memory="high", store=store)
    run(model.instance, ask("t2v")[1])
    assert log == []


@pytest.fixture
def pair(low: Callable) -> tuple[Instance, Log]:
    """A model whose moves are logged."""
    log = Log()
    return low("t2v", Store(homes=log.home)).instance, log


def test_a_component_in_use_does_not_leave(pair: tuple[Instance, Log]) -> None:
    model, log = pair
    with model.using(("text_encoder",)) as parts:
        with model.using(("vae",)):
            assert log.here == {"text", "vae"}
            assert parts["text_encoder"] is model.part("text_encoder") and finite(parts["text_encoder"])
            assert model.store.release("cpu", GIB) == 0
        with model.using(("transformer",)):
            assert log == ["+text", "+vae", "-vae", "+expert"]
    with model.using(("vae",)):
        assert log[4:] == ["-expert", "-text", "+vae"]


def test_leases_of_one_component_add_up(pair: tuple[Instance, Log]) -> None:
    model, log = pair
    with model.using(("vae",)):
        with model.using(("vae",)):
            pass
        with model.using(("text_encoder",)):
            assert log.here == {"vae", "text"}
    assert model.store.release("cpu", GIB) > 0
    assert log.here == set()


def test_a_lease_ends_with_an_error_too(pair: tuple[Instance, Log]) -> None:
    model, log = pair
    with pytest.raises(KeyError), model.using(("vae",)):
        raise KeyError
    with model.using(("text_encoder",)):
        assert log.here == {"text"}


def finite(module: torch.nn.Module) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors_of(module))


def test_threads_never_see_weights_that_are_away_and_layered_ones_are_used_by_one_call_at_a_time(
    pair: tuple[Instance, Log],
) -> None:
    model, log = pair
    inside, wrong, lock = dict.fromkeys(("text_encoder", "vae", "transformer"), 0), [], threading.Lock()

    def work(order: Iterator[str]) -> None:
        for name in order:
            with model.using((name,)) as parts:
                with lock:
                    inside[name] += 1
                    wrong.extend([name] if inside["transformer"] > 1 else [])
                wrong.extend([] if finite(parts[name]) else [name])
                with lock:
                    inside[name] -= 1

    names = list(inside)
    orders = [iter([names[(i + start) % 3] for i in range(60)]) for start in (0, 1, 2, 2)]
    threads = [threading.Thread(target=work, args=(order,)) for order in orders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads) and wrong == []
    assert {"+text", "+vae", "+expert"} <= set(log)


def test_requests_in_several_threads_keep_their_bits_while_components_come_and_go(ask: Callable, low: Callable) -> None:
    log = Log()
    model = low("t2v", Store(0, homes=log.home)).instance
    requests = [ask("t2v", seed=seed)[1] for seed in range(3)]
    expected = [run(ask("t2v")[0].instance, request) for request in requests]
    outputs: dict[int, object] = {}
    threads = [threading.Thread(target=lambda i=i: outputs.update({i: run(model, requests[i])})) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(same(outputs.get(i), expected[i]) for i in range(3))
    assert log.count("+vae") >= 1


def test_who_waits_for_a_layered_component_gets_it_when_it_is_free(pair: tuple[Instance, Log]) -> None:
    model, _ = pair
    entered, through = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        with model.using(("vae", "transformer")) as parts:
            assert finite(parts["vae"]) and finite(parts["transformer"])
            through.set()

    with model.using(("transformer",)):
        thread = threading.Thread(target=work)
        thread.start()
        entered.wait(10)
        assert not through.wait(0.05)
    assert through.wait(10)
    thread.join(10)


def test_a_component_that_cannot_come_takes_nobodys_place() -> None:
    class Stuck(Away):
        def bring(self) -> None:
            raise torch.OutOfMemoryError("no room")

    residence, module = Residence(), torch.nn.Linear(2, 2)
    stuck = Resident((), module, home=Stuck(module, True, "stuck", []), low=True, here=False)
    residence.add(stuck)
    for _ in range(2):  # the second time it would wait for ever if the first had taken it
        with pytest.raises(torch.OutOfMemoryError), Lease(residence, {"stuck": stuck}):
            pass
    assert (stuck.here, stuck.users) == (False, 0)


# Room on demand


def test_release_sends_the_longest_unused_first_and_no_more_than_it_must(pair: tuple[Instance, Log]) -> None:
    model, log = pair
    with model.using(("text_encoder",)), model.using(("vae",)), model.using(("transformer",)):
        pass
    with model.using(("text_encoder",)):
        pass
    names = ("transformer", "vae", "text_encoder")
    sizes = {name: sum(map(size_of, tensors_of(model.part(name)))) for name in names}
    log.clear()
    assert model.store.release("cuda:7", GIB) == 0 and log == []
    assert model.store.release("cpu", 0) == 0 and log == []
    assert model.store.release("cpu", 1) == sizes["transformer"] and log == ["-expert"]
    assert model.store.release("cpu", sizes["vae"] + 1) == sizes["vae"] + sizes["text_encoder"]
    assert log == ["-expert", "-vae", "-text"]
    assert model.store.release("cpu", GIB) == 0


def test_what_high_keeps_can_be_sent_away_and_comes_back(checkpoint: Callable, ask: Callable) -> None:
    model = loopwright.load(checkpoint("t2v"), device="cpu", memory="high", store=Store(0)).instance
    request = ask("t2v")[1]
    before = run(model, request)
    residents = [model._residents[name] for name in ("text_encoder", "transformer", "vae")]
    assert all(resident.here for resident in residents)
    assert model.store.release("cpu", GIB) == 0  # the host is the device: there is nothing to give back
    assert not any(resident.here for resident in residents)
    assert same(run(model, request), before) and all(resident.here for resident in residents)


def test_who_keeps_addresses_holds_what_stays_and_is_refused_what_moves(
    pair: tuple[Instance, Log], checkpoint: Callable
) -> None:
    with pytest.raises(BackendError, match="come and go: 'transformer'; load the model with memory=\"high\""):
        pair[0].hold(("transformer",))
    high = loopwright.load(checkpoint("t2v"), device="cpu", store=Store(0)).instance
    with high.hold(("transformer",)):
        high.store.release("cpu", GIB)
        assert high._residents["transformer"].here


# What survives


def test_two_models_share_a_component_that_moves(checkpoint: Callable, ask: Callable) -> None:
    log = Log()
    store = Store(homes=log.home)
    one, two = (loopwright.load(checkpoint("t2v"), device="cpu", memory="low", store=store) for _ in range(2))
    high, request = ask("t2v", "euler")
    expected = run(high.instance, request)
    assert same(run(one.instance, request), expected) and same(run(two.instance, request), expected)
    assert one.instance.part("vae") is two.instance.part("vae") and len(store) == 4
    assert log.count("+text") == 1  # the second found its embeddings
    with one.instance.using(("vae",)), two.instance.using(("text_encoder",)):
        assert log.here == {"vae", "text"}


def test_versions_and_cached_features_survive_moves_and_end_with_a_change(
    pair: tuple[Instance, Log], ask: Callable
) -> None:
    model, log = pair
    request = ask("t2v")[1]
    run(model, request)
    misses = model.store.features.misses
    run(model, request)
    assert model.store.features.misses == misses and model.version("text_encoder") == 1
    model.changed("text_encoder")
    assert model.version("text_encoder") == 2 and log[-1] == "!text"
    run(model, request)
    assert model.store.features.misses == 2 * misses


class Elsewhere(Whole):
    """A device of its own in the host's memory, with room for so many tensors."""

    def __init__(self, module: torch.nn.Module, room: int = 100) -> None:
        super().__init__(module, "cpu")
        self.room, self.there = room, {}

    def _at_home(self, data: torch.Tensor) -> bool:
        return data.data_ptr() not in self.there

    def _there(self, data: torch.Tensor) -> torch.Tensor:
        if len(self.there) == self.room:
            raise torch.OutOfMemoryError("no room")
        copy = data.clone()
        self.there[copy.data_ptr()] = copy
        return copy

    def away(self) -> list[bool]:
        return [not self._at_home(tensor.data) for tensor in tensors_of(self._module)]


def tied() -> torch.nn.Module:
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    module[2].weight = module[0].weight
    return module


def test_whole_modules_move_and_come_back_with_the_same_bits_ties_and_objects() -> None:
    module = tied()
    before = {name: (tensor.clone(), tensor.data_ptr()) for name, tensor in module.state_dict().items()}
    objects = list(tensors_of(module))
    home = Elsewhere(module)
    home.bring()
    assert all(home.away()) and len(home.there) == len(objects)
    home.bring()
    assert len(home.there) == len(objects)  # nothing is copied twice
    assert home.send() == sum(map(size_of, objects)) and home.send() == 0
    assert not any(home.away()) and module[2].weight is module[0].weight
    after = module.state_dict()
    assert all(after[n].equal(tensor) and after[n].data_ptr() == place for n, (tensor, place) in before.items())
    assert all(a is b for a, b in zip(tensors_of(module), objects, strict=True))


def test_a_change_made_on_the_device_is_not_lost_when_the_weights_leave() -> None:
    module = tied()
    home = Elsewhere(module)
    home.bring()
    with torch.no_grad():
        module[0].weight.fill_(5.0)
    home.changed()
    home.send()
    assert module[0].weight.eq(5.0).all() and not any(home.away())


def test_a_move_that_fails_half_way_is_undone() -> None:
    module = tied()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    home = Elsewhere(module, room=2)
    with pytest.raises(torch.OutOfMemoryError):
        home.bring()
    assert not any(home.away()) and all(tensor.equal(before[name]) for name, tensor in module.state_dict().items())


# The choice


@pytest.mark.parametrize(
    ("needed", "free", "activations", "chosen"),
    [
        (75 * GIB, 100 * GIB, None, "high"), (76 * GIB, 100 * GIB, None, "low"),
        (76 * GIB, 100 * GIB, 10 * GIB, "high"), (91 * GIB, 100 * GIB, 10 * GIB, "low"), (10**15, None, None, "high"),
    ],
)  # fmt: skip
def test_high_is_chosen_where_weights_and_activations_fit(
    needed: int, free: int | None, activations: int | None, chosen: str
) -> None:
    assert choose(needed, free, activations) == chosen


def test_auto_asks_for_the_size_of_what_is_not_loaded_yet(model: Callable) -> None:
    loaded = model("t2v").instance
    own = Instance(loaded.card, loaded.loops, Store(0), device="cpu", locate=loaded.locate, memory="auto")
    whole = own._missing()
    assert own.memory == "high"
    own.part("transformer")
    weights = sum(map(size_of, own.part("transformer").parameters()))
    assert whole - own._missing() == weights > 0


def test_an_unknown_placement_is_refused_before_anything_is_read() -> None:
    with pytest.raises(RequestError, match="unknown memory: 'medium'; choices: auto, high, low"):
        loopwright.load("nowhere/at-all", memory="medium")


def test_loading_says_how_much_it_read_and_how_long_it_took(low: Callable) -> None:
    instance = low("t2v").instance
    for name in ("tokenizer", "vae", "transformer"):
        instance.part(name)
    loaded = instance.store.loaded
    weights = sum(
        sum(t.numel() * t.element_size() for t in tensors_of(instance.part(n))) for n in ("vae", "transformer")
    )
    assert (loaded.components, loaded.bytes) == (3, weights) and 0 < loaded.seconds < 60


def test_weights_written_while_a_component_is_there_or_away_are_those_it_comes_back_with() -> None:
    module = torch.nn.Linear(4, 4)
    home, residence = Elsewhere(module), Residence()
    resident = Resident(("net",), module, home=home, low=True, here=False)
    residence.add(resident)
    for value, there in ((1.0, False), (2.0, True), (3.0, True), (4.0, False)):
        if there:
            residence.enter([resident])
            residence.leave([resident])
        with residence.alone(resident), torch.no_grad():
            module.weight.copy_(torch.full((4, 4), value))
        residence.renew(resident)
        residence.release("", GIB)
        assert home.away() == [False] * 2 and (module.weight == value).all()
        residence.enter([resident])
        assert home.away() == [True] * 2 and (module.weight == value).all()
        residence.leave([resident])
        residence.release("", GIB)
    assert resident.version == 5
