"""Drives headless Chromium by Chrome's DevTools protocol, over a pair of pipes: nothing to install but the browser."""

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

_WAIT_S = 30
_MAX_MESSAGE_BYTES = 64 * 2**20


class Browser:
    """The process, and messages to and from it: JSON, each ended by a zero byte."""

    def __init__(self, reader: asyncio.StreamReader, pipe: int) -> None:
        self._reader = reader
        self._pipe = pipe
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._reading = asyncio.create_task(self._read())

    async def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        os.write(self._pipe, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(_WAIT_S):
            return await answer

    async def open(self, url: str, width: int = 1280, height: int = 900) -> "Page":
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.send(f"{domain}.enable")
        await page.size(width, height)
        await page.send("Page.navigate", url=url)
        await page.until("location.href !== 'about:blank' && document.readyState === 'complete'")
        return page

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def _read(self) -> None:
        try:
            while True:
                self._take(json.loads((await self._reader.readuntil(b"\0"))[:-1]))
        except asyncio.IncompleteReadError:
            for answer in self._answers.values():
                answer.set_exception(ConnectionError("the browser ended"))

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            answer = self._answers.pop(message["id"])
            if answer.done():  # Nobody waits any more.
                return
            if "error" in message:
                answer.set_exception(RuntimeError(message["error"]["message"]))
            else:
                answer.set_result(message["result"])
        elif page := self._pages.get(message.get("sessionId", "")):
            page.note(message["method"], message["params"])


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[str] = []
        """What the console shows in red, and exceptions."""
        self.urls: list[str] = []
        """Of all requests, in order."""

    def note(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.urls.append(parameters["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
            self.errors.append(json.dumps(parameters["args"]))
        elif event == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url', '')}")

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self._browser.send(method, self._session, **parameters)

    async def size(self, width: int, height: int, mobile: bool = False) -> None:
        """In CSS pixels; a phone's screen has two pixels for each."""
        scale = 2 if mobile else 1
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile
        )

    async def scheme(self, name: str) -> None:
        """ "light" or "dark"."""
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    async def value(self, expression: str) -> Any:
        result = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """The expression's value, once that is true. Asks again and again."""
        failure = None
        try:
            async with asyncio.timeout(_WAIT_S):
                while True:
                    try:
                        if value := await self.value(expression):
                            return value
                    except RuntimeError as error:  # Between two documents, or before an element is there.
                        failure = error
                    await asyncio.sleep(0.02)
        except TimeoutError:
            seen = await self.value("document.body.innerText")
            raise AssertionError(f"never: {expression}; {failure}; {self.errors}; page: {seen}") from None

    async def text(self, selector: str) -> str:
        return str(await self.value(f"document.querySelector({json.dumps(selector)}).textContent"))

    async def click(self, selector: str) -> None:
        """With the mouse, where the element is: one that is covered or hidden is not clicked."""
        where = await self.until(f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{block: "nearest"}});
            const {{left, top, width, height}} = element.getBoundingClientRect();
            return width && {{x: left + width / 2, y: top + height / 2}};
        }})()""")
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **where)

    async def type(self, selector: str, text: str) -> None:
        """In place of what is there."""
        await self.click(selector)
        await self.value(f"document.querySelector({json.dumps(selector)}).select()")
        await self.send("Input.insertText", text=text)

    async def screenshot(self, whole: bool = False) -> bytes:
        """PNG of what is seen, or of the whole document."""
        shot = await self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])


def find() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Browser]:
    """`profile`: an empty directory."""
    path = find()
    assert path, "there is no Chromium here: apt-get install chromium"
    flags = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-default-apps",
        "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    down_out, down_in = os.pipe()
    up_out, up_in = os.pipe()
    # The browser reads from its descriptor 3 and writes to its descriptor 4. dash copies none above 9.
    process = await asyncio.create_subprocess_exec(
        "bash", "-c", f'exec "$@" 3<&{down_out} 4>&{up_in}', "bash", path, *flags,
        pass_fds=(down_out, up_in), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    os.close(down_out)
    os.close(up_in)
    reader = asyncio.StreamReader(limit=_MAX_MESSAGE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(up_out, "rb")
    )
    browser = Browser(reader, down_in)
    try:
        yield browser
    finally:
        await browser.close()
        transport.close()
        os.close(down_in)
        process.terminate()
        await process.wait()
