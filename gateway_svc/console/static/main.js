// Starts the page, and asks for figures and iterations while somebody looks.

import { call, events } from "./api.js";
import { startChat } from "./chat.js";
import { drawModes, showState, startFigures } from "./figures.js";
import { addIteration, drawTimeline, sayTimeline, startTimeline } from "./timeline.js";

const POLL_MS = 1000;
const RETRY_MS = 2000;
const trace = document.getElementById("trace");
const status = document.getElementById("status");
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
let changed = Promise.withResolvers(); // Resolves when the page is shown or hidden, or the switch is turned.
let tracing = null; // AbortController of the stream of iterations.

const seen = () => !document.hidden;

function wake() {
  if (!seen() || !trace.checked) tracing?.abort();
  changed.resolve();
  changed = Promise.withResolvers();
}

function say(className, text) {
  status.className = className;
  status.textContent = text;
}

async function pollState() {
  for (;;) {
    if (!seen()) {
      await changed.promise;
      continue;
    }
    try {
      const response = await call("/console/state", { ask: true });
      showState(await response.json());
      say("ok", "serving");
    } catch (error) {
      say("failed", error.message);
      // Without a key there is nothing to see until somebody gives one.
      if (error.status === 401) await keyGiven();
    }
    await pause(POLL_MS);
  }
}

const keyGiven = () => new Promise((resolve) => {
  document.getElementById("key-dialog").addEventListener("close", resolve, { once: true });
});

async function watchIterations() {
  for (;;) {
    if (!seen() || !trace.checked) {
      if (!trace.checked) sayTimeline("off");
      await changed.promise;
      continue;
    }
    tracing = new AbortController();
    try {
      const response = await call("/console/iterations", { signal: tracing.signal });
      sayTimeline("waiting for an iteration");
      for await (const iteration of events(response)) addIteration(iteration);
    } catch (error) {
      if (error.name !== "AbortError") sayTimeline(error.message);
      if (error.status === 401) await keyGiven();
    }
    tracing = null;
    if (seen() && trace.checked) await pause(RETRY_MS);
  }
}

function redraw() {
  drawModes();
  drawTimeline();
}

startChat();
startFigures();
startTimeline();
document.addEventListener("visibilitychange", wake);
trace.addEventListener("change", wake);
window.addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
redraw();
pollState();
watchIterations();
