"""Loops that lease pages, over small real attention modules, each with a plain twin that recomputes everything."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import scaled_dot_product_attention

from fakes import Boom, Fake
from loopwright.caches.kv import KV, kv_page
from loopwright.caches.pool import Pools
from loopwright.caches.residual import LATEST, Residual, residual_page
from loopwright.engine.instance import Instance
from loopwright.loop import Append, Binding, PoolRef, Result, Step, Tensors, Unit, Window
from loopwright.request import Request

LAYERS, HEADS, DIMS, VOCABULARY = 2, 2, 4, 32
WIDTH = HEADS * DIMS
CHUNK = 3
WINDOW = Window(2, 1)


class Attention(torch.nn.Module):
    """Multi-head attention over what a cache holds, or over all tokens at once."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def split(self, x: torch.Tensor) -> list[torch.Tensor]:
        """[R, N, C] -> q, k, v [R, H, N, D]."""
        return [part.unflatten(-1, (HEADS, DIMS)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)]

    def forward(self, x: torch.Tensor, attend) -> torch.Tensor:
        return x + self.out(attend(*self.split(x)).transpose(1, 2).flatten(2))


class Net(torch.nn.Module):
    """A transformer on embeddings; as a language model with its table and head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(64, WIDTH)
        self.blocks = torch.nn.ModuleList([Attention() for _ in range(LAYERS)])
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, x: torch.Tensor, attend) -> torch.Tensor:
        for layer, block in enumerate(self.blocks):
            x = torch.tanh(block(x, lambda q, k, v, layer=layer: attend(layer, q, k, v)))
        return x

    def logits(self, tokens: torch.Tensor, places: torch.Tensor, attend) -> torch.Tensor:
        return self.head(self(self.embed(tokens) + self.place(places), attend))


def net() -> Net:
    """Always the same one."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().requires_grad_(False).eval()


def served(loop: object, pool_bytes: int = 2**20) -> Fake:
    """A model of that loop over `net`."""
    fake = Fake([loop])
    fake.model._residents["transformer"].part = net()
    fake.model.store.pools = Pools(pool_bytes)
    return fake


def leased(model: Instance) -> int:
    """Pages that somebody has."""
    return sum(pool.count - pool.free for pool in model.store.pools)


# --- a sequence of tokens


def next_token(
    parts: Mapping[str, Net],
    *,
    tokens: torch.Tensor,
    kv: Mapping[str, torch.Tensor],
    kv_pages: torch.Tensor,
    kv_length: torch.Tensor,
) -> Tensors:
    """Tokens [R, N] after those cached -> the logits [R, 1, V] of the next, and which it is [R, 1]."""
    cache = KV(kv, kv_pages, kv_length)
    places = kv_length[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
    logits = parts["transformer"].logits(tokens, places, lambda *a: cache.attend(*a, causal=True))[:, -1:]
    return {"logits": logits, "token": logits.argmax(-1)}


FAILING: list[str] = []  # `failing_token` fails once for each entry


def failing_token(parts: Mapping[str, Net], **arguments: torch.Tensor) -> Tensors:
    """Writes past what is committed, spoils all that it may write, and raises."""
    made = next_token(parts, **arguments)
    if not FAILING:
        return made
    FAILING.pop()
    cache = KV(arguments["kv"], arguments["kv_pages"], arguments["kv_length"])
    rows, new = arguments["tokens"].shape
    for layer in range(LAYERS):
        for name in ("k", "v"):
            cache._write(name, layer, torch.full((rows, HEADS, new, DIMS), float("nan")))
    raise Boom("after it wrote")


@dataclass(frozen=True, slots=True)
class TokenState:
    """`tokens` [1, N] go in next; `logits` of each token so far."""

    binding: Binding
    committed: int
    left: int
    tokens: torch.Tensor
    logits: tuple[torch.Tensor, ...]


def prompt_of(seed: int) -> torch.Tensor:
    """[1, 2 to 6] tokens."""
    return torch.randint(VOCABULARY, (1, 2 + seed % 5), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Tokens:
    """Greedy decoding of `count` tokens, a step each."""

    semantics: str = "tokens/v1"
    count: int = 9
    limit: int = 20
    page: int = 4
    op: object = next_token
    state_type = TokenState

    def init(self, request: Request, inputs: Tensors, env: Instance) -> TokenState:
        return TokenState(env.binding, 0, self.count, prompt_of(request.seed).to(env.binding.device), ())

    def next(self, state: TokenState) -> Step | None:
        if not state.left:
            return None
        page = kv_page(layers=LAYERS, tokens=self.page, heads=HEADS, dims=DIMS)
        ref = PoolRef("past", page, Append(self.limit), state.committed, state.tokens.shape[1])
        unit = Unit.TOKEN if state.committed else Unit.ENCODE
        return Step(self.op, ("transformer",), state.binding, {"tokens": state.tokens}, unit=unit, reads=("token",),
                    leases={"kv": ref})  # fmt: skip

    def advance(self, state: TokenState, result: Result) -> tuple[TokenState, Tensors]:
        committed = state.committed + state.tokens.shape[1]
        logits = (*state.logits, result.tensors["logits"])
        return TokenState(state.binding, committed, state.left - 1, result.tensors["token"], logits), {}

    def outlook(self, state: TokenState) -> Sequence[tuple[Unit, int]]:
        return [(Unit.TOKEN, state.left)]

    def finish(self, state: TokenState) -> Tensors:
        return {"latents": torch.cat(state.logits, 1)}


def plain_tokens(seed: int, count: int) -> torch.Tensor:
    """The same without a cache: every step computes all tokens. Logits [1, count, V]."""
    model, tokens, logits = net(), prompt_of(seed), []
    for _ in range(count):
        whole = model.logits(
            tokens,
            torch.arange(tokens.shape[1])[None],
            lambda layer, q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
        )
        logits.append(whole[:, -1:])
        tokens = torch.cat([tokens, logits[-1].argmax(-1)], 1)
    return torch.cat(logits, 1)


# --- a video in chunks


def next_chunk(
    parts: Mapping[str, Net],
    *,
    x: torch.Tensor,
    kv: Mapping[str, torch.Tensor],
    kv_pages: torch.Tensor,
    kv_length: torch.Tensor,
) -> Tensors:
    """A chunk [R, T, C] -> the same, denoised a little, by its past."""
    cache = KV(kv, kv_pages, kv_length)
    return {"x": parts["transformer"](x, lambda *a: cache.attend(*a, causal=False))}


@dataclass(frozen=True, slots=True)
class VideoState:
    """`turn` counts the steps of the chunk under way."""

    binding: Binding
    turn: int
    x: torch.Tensor
    chunks: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Video:
    """`chunks` of two steps each: what the first wrote is not committed, the second writes it again."""

    semantics: str = "video/v1"
    chunks: int = 7
    window: Window = WINDOW
    state_type = VideoState

    def init(self, request: Request, inputs: Tensors, env: Instance) -> VideoState:
        return VideoState(env.binding, 0, first_chunk(request.seed).to(env.binding.device), ())

    def next(self, state: VideoState) -> Step | None:
        if len(state.chunks) == self.chunks:
            return None
        page = kv_page(layers=LAYERS, tokens=CHUNK, heads=HEADS, dims=DIMS)
        ref = PoolRef("past", page, self.window, CHUNK * len(state.chunks), CHUNK)
        return Step(next_chunk, ("transformer",), state.binding, {"x": state.x}, unit=Unit.CHUNK, leases={"kv": ref})

    def advance(self, state: VideoState, result: Result) -> tuple[VideoState, Tensors]:
        x = result.tensors["x"]
        if state.turn == 0:
            return replace(state, turn=1, x=x), {}
        return VideoState(state.binding, 0, x, (*state.chunks, x)), {}

    def outlook(self, state: VideoState) -> Sequence[tuple[Unit, int]]:
        return [(Unit.CHUNK, 2 * (self.chunks - len(state.chunks)) - state.turn)]

    def finish(self, state: VideoState) -> Tensors:
        return {"latents": torch.cat(state.chunks, 1)}


def first_chunk(seed: int) -> torch.Tensor:
    """[1, T, C]."""
    return torch.randn(1, CHUNK, WIDTH, generator=torch.Generator().manual_seed(seed))


def plain_video(seed: int, chunks: int, window: Window) -> torch.Tensor:
    """The same with keys and values of all chunks in lists, of which the sinks and the last are looked at."""
    model, x, made = net(), first_chunk(seed), []
    past: list[dict[int, tuple[torch.Tensor, torch.Tensor]]] = []
    for chunk in range(chunks):
        for _ in range(2):
            now: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

            def attend(layer, q, k, v, now=now, chunk=chunk):
                now[layer] = (k, v)
                seen = [i for i in range(chunk) if i < window.sinks or i >= chunk - window.last]
                keys, values = (torch.cat([*[past[i][layer][j] for i in seen], now[layer][j]], 2) for j in (0, 1))
                return scaled_dot_product_attention(q, keys, values)

            x = model(x, attend)
        past.append(now)
        made.append(x)
    return torch.cat(made, 1)


# --- two guidance branches that skip work, each in its own rhythm


def skip_step(
    parts: Mapping[str, Net],
    *,
    x: torch.Tensor,
    fresh: torch.Tensor,
    cond: Mapping[str, torch.Tensor],
    cond_pages: torch.Tensor,
    cond_length: torch.Tensor,
    uncond: Mapping[str, torch.Tensor],
    uncond_pages: torch.Tensor,
    uncond_length: torch.Tensor,
) -> Tensors:
    """x [R, T, C]; fresh bool [R, 2]: whether a branch computes, or takes what it remembers."""
    made = []
    for i, memory in enumerate(
        (Residual(cond, cond_pages, cond_length), Residual(uncond, uncond_pages, uncond_length))
    ):
        new = torch.where(fresh[:, i, None, None], branch(parts["transformer"], x, i), memory.recall("block"))
        memory.remember("block", new)
        made.append(new)
    return {"x": x + 0.1 * (made[1] + 3 * (made[0] - made[1]))}


def branch(model: Net, x: torch.Tensor, i: int) -> torch.Tensor:
    """What a branch adds."""
    return model(x + i, lambda layer, q, k, v: scaled_dot_product_attention(q, k, v))


@dataclass(frozen=True, slots=True)
class SkipState:
    """How often each branch remembered something."""

    binding: Binding
    step: int
    x: torch.Tensor
    known: tuple[int, ...]


@dataclass(frozen=True)
class Skip:
    """`steps`, of which a branch computes every second or third; which, depends on the seed."""

    semantics: str = "skip/v1"
    steps: int = 8
    state_type = SkipState

    def init(self, request: Request, inputs: Tensors, env: Instance) -> SkipState:
        return SkipState(env.binding, 0, first_chunk(request.seed).to(env.binding.device), (0, 0))

    def next(self, state: SkipState) -> Step | None:
        if state.step == self.steps:
            return None
        page = residual_page({"block": (CHUNK, WIDTH)})
        names = ("cond", "uncond")
        refs = {name: PoolRef(f"residual.{name}", page, LATEST, n) for name, n in zip(names, state.known, strict=True)}
        fresh = torch.tensor([computes(state.step)], device=state.binding.device)
        return Step(skip_step, ("transformer",), state.binding, {"x": state.x, "fresh": fresh}, unit=Unit.DENOISE,
                    leases=refs)  # fmt: skip

    def advance(self, state: SkipState, result: Result) -> tuple[SkipState, Tensors]:
        known = tuple(n + fresh for n, fresh in zip(state.known, computes(state.step), strict=True))
        return SkipState(state.binding, state.step + 1, result.tensors["x"], known), {}

    def outlook(self, state: SkipState) -> Sequence[tuple[Unit, int]]:
        return [(Unit.DENOISE, self.steps - state.step)]

    def finish(self, state: SkipState) -> Tensors:
        return {"latents": state.x}


def computes(step: int) -> tuple[bool, bool]:
    """Whether each branch computes in that step."""
    return step % 2 == 0, step % 3 == 0


def plain_skip(seed: int, steps: int) -> torch.Tensor:
    """The same with variables."""
    model, x = net(), first_chunk(seed)
    last: list[torch.Tensor] = [x, x]
    for step in range(steps):
        last = [branch(model, x, i) if computes(step)[i] else last[i] for i in (0, 1)]
        x = x + 0.1 * (last[1] + 3 * (last[0] - last[1]))
    return x
