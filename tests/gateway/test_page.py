"""The page in a browser, in front of a scripted service. `make page-check` installs what these tests need."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gateway.token_texts import TokenTexts
from specdec import errors
from specdec.serving.status import to_status
from specdec.serving.tokenizer import load_tokenizer
from specdec.v1 import generation_pb2 as pb
from tests.support.browser import browser, needs_browser
from tests.support.cluster import save_tokenizer
from tests.support.gateway import OFFER, serving_gateway
from tests.support.scripted import SESSION, Send, Service, digest_at, served

pytestmark = [needs_browser, pytest.mark.asyncio(loop_scope="module")]

MARKUP = "<img src=x onerror=\"document.title='broken'\">"
# a round that was accepted whole, a round with a rejection, one without drafts; each with the texts of its tokens
ROUNDS = [
    (["Once", " upon", " a"], "accepted accepted bonus", {"drafter": "suffix", "num_draft_tokens": 2, "depth": 2}),
    ([" time", "\n"], "accepted recovered", {"drafter": "model", "num_draft_tokens": 9, "depth": 4}),
    ([MARKUP], "bonus", None),  # read from the store, which does not know who drafted
]
ORIGINS = {"accepted": pb.TOKEN_ORIGIN_ACCEPTED, "recovered": pb.TOKEN_ORIGIN_RECOVERED, "bonus": pb.TOKEN_ORIGIN_BONUS}
PLAIN = {"drafter": "none"}
TEXT = "".join(text for texts, _, _ in ROUNDS for text in texts)
NUM_TOKENS = 6


def finish(*, is_plain: bool) -> pb.Finish:
    statistics = pb.Statistics(num_rounds=NUM_TOKENS, num_tokens=NUM_TOKENS, total_s=1.0)
    if not is_plain:
        statistics = pb.Statistics(num_rounds=3, num_draft_tokens=4, num_accepted_tokens=3, num_tokens=NUM_TOKENS)
        statistics.num_drafts_per_depth.extend([2, 2])
        statistics.num_accepted_tokens_per_depth.extend([2, 1])
    usage = pb.Usage(num_prompt_tokens=3, num_completion_tokens=NUM_TOKENS)
    return pb.Finish(reason=pb.FINISH_REASON_STOP, usage=usage, statistics=statistics)


class Story(Service):
    """Tells the same text to everybody, plain or with speculation, or what a test puts into `failure` or `endless`."""

    def __init__(self) -> None:
        super().__init__()
        self.offer = OFFER
        self.failure: errors.SpecdecError | None = None
        self.model_failure: errors.SpecdecError | None = None
        self.is_endless = False
        self.cancelled = asyncio.Event()
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def GetModel(self, request: Any, context: Any) -> Any:
        if self.model_failure:
            await abort(context, self.model_failure)
        return self.offer

    async def CancelSession(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        self.cancelled.set()
        return pb.CancelSessionResponse(status=pb.SESSION_STATUS_CANCELLED)

    async def Generate(self, request: Any, context: Any) -> None:  # type: ignore[override]  # writes by itself
        self.requests.append(request)
        if self.failure:
            await abort(context, self.failure)
        is_plain = request.speculation.HasField("num_draft_tokens") and not request.speculation.num_draft_tokens
        rounds = [([text], "bonus", PLAIN) for texts, _, _ in ROUNDS for text in texts] if is_plain else ROUNDS
        await self._tell(rounds, is_plain, lambda **fields: context.write(pb.GenerateResponse(**fields)))

    async def _tell(self, rounds: Any, is_plain: bool, send: Send) -> None:
        offset = 0
        for texts, origins, draft in rounds:
            await send(**piece(offset, texts, origins, draft))
            offset += len(texts)
            await asyncio.sleep(0.05 if is_plain else 0.02)  # the speeds that the page compares
            await self.go_on.wait()
        if self.is_endless:
            await asyncio.Event().wait()
        last = piece(offset, [], "", None)
        await send(**last, finish=finish(is_plain=is_plain))


async def abort(context: Any, failure: errors.SpecdecError) -> None:
    await context.abort_with_status(to_status(failure))


def piece(offset: int, texts: list[str], origins: str, draft: dict[str, Any] | None) -> dict[str, Any]:
    """Return the fields of a chunk; the probability of its first token is a half, and each next one's half of that."""
    ends = [len("".join(texts[: count + 1])) for count in range(len(texts))]
    tops = [[pb.TopLogprob(token=0, logprob=-2.0)] for _ in texts]
    return {
        "session_id": SESSION,
        "offset": offset,
        "tokens": range(offset, offset + len(texts)),
        "text": "".join(texts),
        "origins": [ORIGINS[origin] for origin in origins.split()],
        "digest": digest_at(offset + len(texts)),
        "text_ends": ends,
        "logprobs": [pb.TokenLogprobs(logprob=-0.693147 * (place + 1), top=top) for place, top in enumerate(tops)],
        "rounds": [pb.RoundDraft(**draft, end=offset + len(texts))] if draft else [],
    }


class Visit:
    """The page in a browser, what it asked for, and what went wrong in it."""

    def __init__(self, page: Any, base: str) -> None:
        self.page, self.base = page, base
        self.urls: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.urls.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._note)

    def _note(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def part(self, selector: str) -> Any:
        return self.page.locator(selector)

    async def says(self, selector: str, words: str) -> None:
        """Wait until an element's text matches."""
        from playwright.async_api import expect

        await expect(self.part(selector)).to_have_text(re.compile(words, re.DOTALL), timeout=60_000)

    async def style(self, selector: str, name: str) -> str:
        return str(await self.part(selector).first.evaluate("(e, name) => getComputedStyle(e)[name]", name))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Any]:
    async with browser() as running:
        yield running


@pytest.fixture
def service() -> Story:
    return Story()


@pytest.fixture
def tokenizer(service: Story, tmp_path: Path) -> str:
    """Save the tokenizer of the model that the service offers."""
    name = str(save_tokenizer(tmp_path, NUM_TOKENS))
    service.offer = pb.GetModelResponse()
    service.offer.CopyFrom(OFFER)
    service.offer.target.tokenizer_fingerprint = TokenTexts(load_tokenizer(name)).fingerprint
    return name


@pytest_asyncio.fixture(loop_scope="module")
async def base(service: Story, tokenizer: str) -> AsyncIterator[str]:
    """Where a gateway serves the page."""
    async with (
        served(service) as coordinator,
        serving_gateway(f"127.0.0.1:{coordinator}", tokenizer=tokenizer) as port,
    ):
        yield f"http://127.0.0.1:{port}/"


@asynccontextmanager
async def visiting(running: Any, base: str, **options: Any) -> AsyncIterator[Visit]:
    page = await running.new_page(**options)
    visit = Visit(page, base)
    await page.goto(base)
    yield visit
    await page.close()


@pytest_asyncio.fixture(loop_scope="module")
async def visit(running: Any, base: str) -> AsyncIterator[Visit]:
    async with visiting(running, base) as visit:
        await visit.says("#model", "toy, 64 tokens")
        yield visit
        assert visit.complaints == []
        assert all(url.startswith(visit.base) for url in visit.urls)


async def generated(visit: Visit) -> None:
    await visit.part("#generate").click()
    await visit.says("#status", "Done: 6 tokens")


async def test_text_is_drawn_by_origin(visit: Visit, service: Story) -> None:
    await visit.part("#prompt").fill("Tell me.")
    await generated(visit)
    assert service.requests[0].text == "Tell me."
    tokens = visit.part("#speculative-pane .token")
    kinds = [await tokens.nth(place).get_attribute("class") for place in range(NUM_TOKENS)]
    assert [kind.split()[1] for kind in kinds] == [origin for _, origins, _ in ROUNDS for origin in origins.split()]
    marks = {kind: await visit.style(f".tokens .{kind}", "textDecorationStyle") for kind in ORIGINS}
    assert marks == {"accepted": "solid", "recovered": "dotted", "bonus": "double"}
    colours = {await visit.style(f".tokens .{kind}", "textDecorationColor") for kind in ORIGINS}
    assert colours == {"rgb(0, 158, 115)", "rgb(213, 94, 0)", "rgb(0, 114, 178)"}


async def test_rounds_and_depths_are_drawn(visit: Visit) -> None:
    await generated(visit)
    assert await visit.part("#rounds .round").count() == 3
    await visit.says("#latest-round", "Round 3: drafted 0 tokens; 0 accepted, 1 bonus")
    assert await visit.part("#drafters li").all_inner_texts() == [
        "suffix: 1 round, 2.0 drafted and 2.0 accepted each",
        "model: 1 round, 9.0 drafted and 1.0 accepted each",
    ]
    assert await visit.part("#rounds .lost").count() == 1
    await visit.says("#drafting", "1.3 tokens on average. 75 % of 4 draft tokens accepted")
    assert await visit.part("#depths td:last-child").all_inner_texts() == ["2 of 2, 100 %", "1 of 2, 50 %"]


async def test_figures_follow_the_stream(visit: Visit, service: Story) -> None:
    service.go_on.clear()
    await visit.part("#generate").click()
    await visit.says("#latest-round", "Round 1: drafted 2 tokens by suffix; 2 accepted, 1 bonus")
    assert await visit.part("#depths td:last-child").all_inner_texts() == ["1 round", "1 round"]
    service.go_on.set()
    await visit.says("#status", "Done")


async def test_texts_are_never_markup(visit: Visit) -> None:
    await visit.part("#prompt").fill(MARKUP)
    await generated(visit)
    assert await visit.part("#speculative-pane .tokens").evaluate("e => e.textContent") == TEXT
    assert await visit.part("img").count() == 0
    await visit.part("#speculative-pane .token").last.hover()
    await visit.says("#speculative-readout", re.escape(f"“{MARKUP}” is bonus"))
    assert await visit.page.title() == "specdec"


async def test_comparison_shows_a_ratio(visit: Visit, service: Story) -> None:
    await visit.part("#compare").click()
    await visit.says("#ratio", r"^\d+\.\d\d times the speed of plain decoding$")
    await visit.says("#comparison-note", "one after the other.*Both texts are the same, token for token")
    first, second = service.requests
    assert not first.speculation.HasField("num_draft_tokens")
    assert second.speculation.num_draft_tokens == 0
    assert first.sampling.HasField("seed")
    assert first.sampling.seed == second.sampling.seed
    speeds = [float(await visit.part(f"#{name}-pane .rate").inner_text()) for name in ("speculative", "plain")]
    ratio = float((await visit.part("#ratio").inner_text()).split()[0])
    assert ratio == pytest.approx(speeds[0] / speeds[1], rel=0.02)
    assert await visit.part("#plain-pane .token.plain").count() == NUM_TOKENS


async def test_both_run_at_once_if_asked(visit: Visit, service: Story) -> None:
    service.go_on.clear()
    await visit.part("#together").check()
    await visit.part("#compare").click()
    await visit.says("#speculative-pane .counts", "^3 tokens")
    await visit.says("#plain-pane .counts", "^1 token ")
    service.go_on.set()
    await visit.says("#comparison-note", "run at once")


@pytest.mark.parametrize("by_key", [False, True])
async def test_stop_ends_the_session(visit: Visit, service: Story, by_key: bool) -> None:
    service.is_endless = True
    await visit.part("#compare").click()
    await visit.says("#speculative-pane .counts", "^6 tokens")
    await (visit.page.keyboard.press("Escape") if by_key else visit.part("#stop").click())
    await visit.says("#status", "Stopped")
    await service.cancelled.wait()
    service.is_endless = False
    await generated(visit)


async def test_keyboard_alone_is_enough(visit: Visit) -> None:
    press = visit.page.keyboard.press
    await visit.part("#prompt").focus()
    await press("Control+Enter")
    await visit.says("#status", "Done")
    while not await visit.part(".tokens .token:focus").count():
        await press("Tab")
    await visit.says("#speculative-readout", "“Once” is accepted.*Probability 50 %")
    await press("ArrowRight")
    await visit.says("#speculative-readout", "“ upon” is accepted.*Probability 25 %")
    await press("End")
    await visit.says("#speculative-readout", "is bonus")
    await press("Tab")
    assert await visit.part(".tokens .token:focus").count() == 0
    await press("Shift+Tab")
    assert await visit.part(".tokens .token:focus").inner_text() == MARKUP


async def test_settings_reach_the_service(visit: Visit, service: Story) -> None:
    await visit.part("#form").select_option("chat")
    await visit.part("#drafter").select_option("ngram")
    for name, value in (("draft-tokens", "4"), ("max-tokens", "9"), ("temperature", "0.5"), ("seed", "7")):
        await visit.part(f"#{name}").fill(value)
    await generated(visit)
    [request] = service.requests
    assert request.chat.messages[0].role == "user"
    assert (request.speculation.drafter, request.speculation.num_draft_tokens) == ("ngram", 4)
    assert (request.sampling.max_new_tokens, request.sampling.temperature, request.sampling.seed) == (9, 0.5, 7)


async def test_page_fits_a_narrow_screen(running: Any, base: str) -> None:
    async with visiting(running, base, viewport={"width": 360, "height": 640}) as visit:
        await visit.part("#compare").click()
        await visit.says("#ratio", "times")
        assert await visit.page.evaluate("document.documentElement.scrollWidth") == 360


# ---- errors in words


async def test_page_works_without_probabilities(running: Any, service: Story) -> None:
    async with (
        served(service) as coordinator,
        serving_gateway(f"127.0.0.1:{coordinator}") as port,
        visiting(running, f"http://127.0.0.1:{port}/") as visit,
    ):
        await generated(visit)
        await visit.part("#speculative-pane .token").first.hover()
        await visit.says("#speculative-readout", "kept by the target.$")


async def test_refusals_are_told(running: Any, base: str, service: Story) -> None:
    service.failure = errors.InvalidArgumentError({"sampling.max_new_tokens": "is 128; this server's limit is 64"})
    async with visiting(running, base) as visit:
        await visit.part("#generate").click()
        await visit.says("#problem-text", "max_tokens is 128; this server's limit is 64")
        service.failure = None
        await generated(visit)
        assert await visit.part("#problem").is_hidden()


async def test_chat_without_template_offers_text(running: Any, base: str, service: Story) -> None:
    service.failure = errors.InvalidArgumentError({"chat": "cannot be rendered: this model has no chat template"})
    async with visiting(running, base) as visit:
        await visit.part("#form").select_option("chat")
        await visit.part("#generate").click()
        await visit.says("#problem-text", "no chat template")
        service.failure = None
        await visit.part("#as-text").click()
        await visit.says("#status", "Done")
        assert service.requests[-1].text


async def test_service_that_is_away_is_told(running: Any, base: str) -> None:
    async with visiting(running, base) as visit:
        await visit.says("#status", "Ready")
        await visit.page.route("**/v1/**", lambda route: route.abort())
        await visit.part("#generate").click()
        await visit.says("#problem-text", "cannot be reached")


async def test_key_is_asked_for_and_sent(running: Any, base: str, service: Story) -> None:
    service.model_failure = errors.UnauthenticatedError("the call carries no token")
    async with visiting(running, base) as visit:
        await visit.says("#problem-text", "the call carries no token")
        assert await visit.part("#key").is_visible()
        service.model_failure = None
        await visit.part("#key").fill("secret")
        async with visit.page.expect_request("**/v1/models") as asked:
            await visit.page.keyboard.press("Tab")
        assert (await asked.value).headers["authorization"] == "Bearer secret"
        await generated(visit)
        stored = await visit.page.evaluate("JSON.stringify([localStorage, sessionStorage])")
        assert "secret" not in stored


# ---- both themes


def luminance(colour: str) -> float:
    """Return the relative luminance of `rgb(...)` (WCAG 2)."""
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_contrasts_suffice(running: Any, base: str, scheme: str) -> None:
    async with visiting(running, base, color_scheme=scheme) as visit:
        await generated(visit)
        ground, panel = await visit.style("body", "backgroundColor"), await visit.style(".pane", "backgroundColor")
        assert (luminance(ground) < 0.1) == (scheme == "dark")
        for selector in ("body", ".note", ".keys", "#problem", "#as-text", ".tokens .token", "label"):
            for behind in (ground, panel):
                assert contrast(await visit.style(selector, "color"), behind) >= 4.5, selector
        for kind in ORIGINS:
            assert contrast(await visit.style(f".tokens .{kind}", "textDecorationColor"), panel) >= 3, kind
        button = [await visit.style("#generate", name) for name in ("color", "backgroundColor")]
        assert contrast(*button) >= 4.5


async def test_theme_is_chosen_and_remembered(visit: Visit) -> None:
    light = await visit.style("body", "backgroundColor")
    await visit.part("#theme").select_option("dark")
    assert await visit.style("body", "backgroundColor") != light
    await visit.page.reload()
    assert luminance(await visit.style("body", "backgroundColor")) < 0.1


async def test_motion_is_left_out_if_unwanted(running: Any, base: str) -> None:
    async with visiting(running, base, reduced_motion="reduce") as visit:
        assert await visit.style(".bar", "transitionDuration") == "0s"
