"""The console in headless Chromium: before the real services, and before a planner that a test scripts."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from support.chromium import Browser, Page
from support.fake_planner import Answer, FakePlanner, fake_planner
from support.traces import decoupled, gpu_only, pipelined

from gateway_svc.server import GatewayServer
from neoflex.supervisor import LocalStack
from neoflex.v1 import inference_pb2 as pb
from svc_common.config import GatewayConfig, parse
from svc_common.errors import resource_exhausted

PICTURES = Path(__file__).parents[2] / "build" / "console"
PROMPT = "Name three planets and say a word about each."
ANSWER = "document.querySelector('.message.assistant:last-child .text')?.textContent"
IDLE = "document.getElementById('stop').hidden && !!document.querySelector('.message.assistant:last-child small')"
NUM_LOADS = 8
CLASSES = {"batch": {}, "chat": {"ttft_s": 5, "tpot_s": 0.5, "priority": 1}}
# Pixels of the timeline in a colour of the style sheet.
PAINTED = """(() => {
    const canvas = document.getElementById("timeline"), probe = document.createElement("canvas").getContext("2d");
    probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--%s").trim();
    probe.fillRect(0, 0, 1, 1);
    const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
    const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    let painted = 0;
    for (let i = 0; i < data.length; i += 4) painted += data[i] === r && data[i + 1] === g && data[i + 2] === b;
    return painted;
})()"""

# Whether the lane of the CPU, at the picture's foot, is of more than one colour.
CPU_LANE = """(() => {
    const canvas = document.getElementById("timeline");
    const {data} = canvas.getContext("2d").getImageData(60, 110, canvas.width - 60, 1);
    return new Set(new Uint32Array(data.buffer)).size > 1;
})()"""


@pytest.fixture
def stack() -> Iterator[LocalStack]:
    """A "GPU" cache too small for the load, so that the CPU attends."""
    with tempfile.TemporaryDirectory(prefix="nfx-") as directory:
        values: dict[str, Any] = {
            "model": {"source": "smollm2-135m-instruct"},
            "planner": {"listen": "127.0.0.1:0", "mode": "asymmetric", "classes": CLASSES, "default_class": "chat"},
            "gpu": {"device": "cpu", "dtype": "fp32", "kv_bytes": "12MiB"},
            "cpu_attn": {"kv_bytes": "128MiB"},
            "gateway": {"listen": "127.0.0.1:0"},
        }
        started = LocalStack(parse(values, "test"), Path(directory))
        started.start()
        try:
            started.wait_ready(120)
            yield started
        finally:
            started.stop()


@asynccontextmanager
async def load(url: str) -> AsyncIterator[None]:
    """Requests one after another on several connections."""

    async def ask(http: httpx2.AsyncClient, number: int) -> None:
        body = {"prompt": f"Story {number}. " * 30, "max_tokens": 120, "ignore_eos": True}
        while True:
            (await http.post("/v1/completions", json=body)).raise_for_status()

    async with httpx2.AsyncClient(base_url=url, timeout=120) as http:
        tasks = [asyncio.create_task(ask(http, number)) for number in range(NUM_LOADS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results), results


async def opened(browser: Browser, url: str) -> Page:
    """With its first figures, which move what is below them."""
    page = await browser.open(url)
    await page.until("document.getElementById('status').className === 'ok'")
    return page


async def ask(page: Page, text: str) -> None:
    await page.type("#prompt", text)
    await page.click("#send")


async def check_fits(page: Page, width: int) -> None:
    """Nothing is wider than the screen, and no element sticks out of it."""
    assert await page.value("document.documentElement.scrollWidth") <= width
    wide = """[...document.querySelectorAll("body *")].filter(
        (element) => element.getBoundingClientRect().right > innerWidth + 1).map((element) => element.outerHTML)"""
    assert await page.value(wide) == []


async def test_chat_and_figures_of_the_real_services(stack: LocalStack, browser: Browser) -> None:
    url = stack.console_url
    assert url is not None
    page = await opened(browser, url)
    await page.scheme("light")
    assert "smollm2-135m-instruct" in await page.text("#model")
    async with load(url):
        await page.click("#options summary")
        await page.type("#temperature", "0")
        await page.type("#max-tokens", "48")
        await page.click("#options summary")
        await ask(page, PROMPT)
        seen = await page.until(ANSWER)
        assert not await page.value("document.getElementById('stop').hidden")
        await page.until(IDLE)
        answer = await page.value(ANSWER)
        assert answer.startswith(seen)
        assert len(answer) > len(seen)
        await page.until("Number(document.getElementById('timeline').dataset.iterations) >= 8")
        # The first iterations may have had nothing for the CPU.
        await page.until(f"{PAINTED % 'asymmetric'} > 500 && {PAINTED % 'linear-0'} > 500")
        await page.until(CPU_LANE)
        assert await page.until("parseFloat(document.getElementById('rate').textContent) > 0")
        await page.until("Number(document.getElementById('running').textContent) >= 1")
        for tier in ("GPU", "Host"):
            used = f"[...document.querySelectorAll('.bar')].find((bar) => bar.textContent.startsWith('{tier}'))"
            await page.until(f"{used}.querySelector('.fill').getBoundingClientRect().width > 0")
        assert await page.text("#classes tr:nth-child(2) td") == "chat"
        await pictures(page)
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 48, "temperature": 0}
    async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
        response = await http.post("/v1/chat/completions", json=body)
    assert answer == response.json()["choices"][0]["message"]["content"]
    assert page.errors == []
    assert {urlsplit(each).netloc for each in page.urls} == {urlsplit(url).netloc}


async def pictures(page: Page) -> None:
    """In either colour scheme, on a desk and on a phone."""
    for width, height, mobile, name in ((1280, 900, False, "desk"), (390, 844, True, "phone")):
        await page.size(width, height, mobile)
        for scheme in ("light", "dark"):
            await page.scheme(scheme)
            await page.until(PAINTED % "asymmetric")
            await check_fits(page, width)
            keep(f"{name}-{scheme}.png", await page.screenshot(whole=mobile))
    await page.size(1280, 900)


def keep(name: str, picture: bytes) -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / name).write_bytes(picture)


@asynccontextmanager
async def scripted(**keys: Any) -> AsyncIterator[tuple[FakePlanner, str]]:
    """A gateway with these keys of [gateway] before a scripted planner, and the page's address."""
    async with fake_planner() as planner:
        config = GatewayConfig.model_validate({"listen": "127.0.0.1:0", "min_drain_s": 0, **keys})
        server = GatewayServer(config, planner.address, grace_s=5)
        await server.start()
        try:
            yield planner.fake, f"http://{server.address}/"
        finally:
            await server.stop()


def told(uptime_s: float, generated_tokens: int) -> pb.GetServerInfoResponse:
    """Two pools, one of them lost."""
    chat = pb.ServiceClass(name="chat", is_default=True, requests_in_time=3, requests_late=1, requests_refused=1234)
    chat.targets.ttft.FromMilliseconds(2500)
    chat.targets.tpot.FromMilliseconds(50)
    pools = [
        pb.HostPoolInfo(num_blocks=2000, num_threads=2, min_threads=1, max_threads=4),
        pb.HostPoolInfo(error="connection refused"),
    ]
    counters = pb.ServerCounters(
        generated_tokens=generated_tokens,
        prefilled_tokens=300,
        cached_tokens=100,
        executor_busy_ns=round(uptime_s * 0.75e9),
        cpu_wait_ns=round(uptime_s * 0.25e9),
        cpu_attention_ns=round(uptime_s * 0.1e9),
        decoupled_iterations=round(uptime_s),
    )
    return pb.GetServerInfoResponse(
        uptime_s=uptime_s,
        device="cuda",
        block_bytes=2**20,
        host_block_bytes=2**19,
        host_pools=pools,
        service_classes=[chat, pb.ServiceClass(name="batch")],
        counters=counters,
    )


async def test_figures_in_words(browser: Browser) -> None:
    async with scripted() as (fake, url):
        fake.server_info = told(10, 1000)
        fake.traces.traces = [decoupled(1, 0, unit_ns=100_000)]
        fake.load = pb.GetLoadResponse(
            running_requests=2,
            waiting_requests=3,
            max_waiting_requests=64,
            gpu_blocks_used=10,
            gpu_blocks_total=40,
            host_pool_blocks_used=[500, 0],
            classes=[pb.ClassLoad(name="chat", waiting_requests=3, running_requests=2)],
        )
        page = await opened(browser, url)
        await page.until("document.getElementById('running').textContent === '2'")
        fake.server_info = told(14, 1200)
        await page.until("document.getElementById('rate').textContent === '50.0'")
        tiles = "[...document.querySelectorAll('.tile')].map((tile) => [...tile.children].map((c) => c.textContent))"
        assert (await page.value(tiles))[1:] == [
            ["Running", "2", "3 queued of 64"],
            ["GPU busy", "50 %", "25 % waits for CPU"],
            ["CPU attention", "2 cores", "10 % busy · 1 to 4"],
            ["Targets met", "75 %", "3 met, 1 missed"],
            ["Prompt from cache", "25 %", "100 tokens"],
        ]
        bars = "[...document.querySelectorAll('.bar')].map((bar) => bar.textContent)"
        assert await page.value(bars) == [
            "GPU10 / 40 · 10 MiB",
            "Host 0500 / 2,000 · 250 MiB",
            "Host 1connection refused",
        ]
        rows = "[...document.querySelectorAll('#classes tr')].map((row) => [...row.cells].map((c) => c.textContent))"
        assert await page.value(rows) == [
            ["chat", "2.5 s / 50 ms", "2", "3", "3", "1", "1,234"],
            ["batch", "none", "0", "0", "0", "0", "0"],
        ]
        await page.until(PAINTED % "decoupled")
        assert await page.value(PAINTED % "linear-2") > 100
        note = await page.text("#timeline-note")
        assert (
            note
            == "Iteration 1, decoupled: 10.0 ms, GPU 91 % busy, CPU attention 45 %; 4 decoded on the GPU, 2 on the CPU"
        )
        await page.size(390, 844, mobile=True)
        await check_fits(page, 390)
        keep("scripted.png", await page.screenshot(whole=True))
        assert page.errors == []


async def test_what_a_model_writes_is_text(browser: Browser) -> None:
    wrote = "<img src=x onerror=alert(1)><script>alert(2)</script> & **so on**"
    async with scripted() as (fake, url):
        fake.answer = Answer(pieces=(wrote,))
        page = await opened(browser, url)
        await ask(page, "<b>Hi</b>")
        await page.until(IDLE)
        assert await page.value(ANSWER) == wrote
        assert await page.text(".message.user .text") == "<b>Hi</b>"
        assert await page.value("document.querySelectorAll('#messages img, #messages script, #messages b').length") == 0
        assert page.errors == []


async def test_a_conversation_with_options(browser: Browser) -> None:
    async with scripted() as (fake, url):
        page = await opened(browser, url)
        await page.click("#options summary")
        await page.type("#system", "Be brief.")
        await page.type("#temperature", "0.5")
        await page.type("#max-tokens", "7")
        for text in ("One", "Two"):
            await ask(page, text)
            await page.until(f"{IDLE} && document.querySelectorAll('.message').length === {2 if text == 'One' else 4}")
        turns = [(turn.role, turn.content) for turn in fake.requests[1].chat.messages]
        assert turns == [("system", "Be brief."), ("user", "One"), ("assistant", "Hello"), ("user", "Two")]
        assert fake.requests[1].sampling.temperature == 0.5
        assert fake.requests[1].stopping.max_tokens == 7
        await page.click("#clear")
        assert await page.value("document.querySelectorAll('.message').length") == 0


async def test_stopping_and_failing(browser: Browser) -> None:
    async with scripted() as (fake, url):
        fake.answers = [
            Answer(hold=asyncio.Event()),
            Answer(refusal=resource_exhausted("QUEUE_FULL", "too many requests wait", "queue", 3)),
        ]
        page = await opened(browser, url)
        await ask(page, "Hi")
        await page.until(f"{ANSWER} === 'Hel'")
        await page.click("#stop")
        async with asyncio.timeout(30):
            await fake.cancelled.acquire()
        await page.until(IDLE)
        assert await page.text(".message:last-child small") == "stopped"
        await ask(page, "Again")
        await page.until("!!document.querySelector('.message:last-child .error')")
        assert await page.text(".message:last-child .error") == "too many requests wait Try again in 3 s."


async def test_a_key_is_asked_for_and_kept(browser: Browser, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("open-sesame")
    async with scripted(api_keys_file=keys) as (_, url):
        page = await browser.open(url)
        for key in ("wrong", "open-sesame"):
            await page.until("document.getElementById('key-dialog').open")
            await page.type("#key", key)
            await page.click("#key-form [type=submit]")
            await page.until("!document.getElementById('key-dialog').open || !document.getElementById('key').value")
        await page.until("document.getElementById('status').className === 'ok'")
        await ask(page, "Hi")
        await page.until(f"{ANSWER} === 'Hello'")
        await page.send("Page.reload")
        await page.until("document.getElementById('status').className === 'ok'")
        assert await page.value("Object.keys(localStorage).length + document.cookie.length") == 0


async def test_nobody_asks_while_nobody_looks(browser: Browser) -> None:
    async with scripted() as (fake, url):
        fake.traces.traces = [pipelined(1, 0, 100_000), gpu_only(2, 10_000_000)]
        page = await opened(browser, url)
        await page.until("document.getElementById('timeline').dataset.iterations == 2")
        await page.click("#trace")  # Off.
        async with asyncio.timeout(30):
            await fake.traces.ended.acquire()
        await page.until("document.getElementById('timeline-note').textContent === 'off'")
        await page.click("#trace")
        await page.until("document.getElementById('timeline').dataset.iterations == 4")
        await look(page, away=True)
        async with asyncio.timeout(30):
            await fake.traces.ended.acquire()
        await page.value("new Promise((resolve) => setTimeout(resolve, 1100))")  # What was under way has ended.
        asked = len(page.urls)
        await page.value("new Promise((resolve) => setTimeout(resolve, 2000))")
        assert len(page.urls) == asked
        await look(page, away=False)
        await page.until("document.getElementById('timeline').dataset.iterations == 6")
        assert any(each.endswith("/console/state") for each in page.urls[asked:])
        assert page.errors == []


async def look(page: Page, away: bool) -> None:
    """As the browser tells a page that its tab is hidden or shown."""
    hidden = json.dumps(away)
    await page.value(f"Object.defineProperty(document, 'hidden', {{configurable: true, get: () => {hidden}}})")
    await page.value("document.dispatchEvent(new Event('visibilitychange'))")
