// The chat: one conversation, streamed, with what each answer took.

import { call, events } from "./api.js";

const byId = (id) => document.getElementById(id);
const list = byId("messages");
let turns = []; // What was said, as the API takes it.
let running = null; // AbortController of the answer under way.

function element(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text; // Never as HTML.
  return made;
}

function show(className, text) {
  byId("hint").hidden = true;
  const message = element("div", `message ${className}`);
  const body = element("span", "text", text);
  message.append(body);
  list.append(message);
  list.scrollTop = list.scrollHeight;
  return { message, body };
}

function request(messages) {
  const system = byId("system").value.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: Number(byId("temperature").value || 1),
    max_tokens: Number(byId("max-tokens").value || 256),
  };
  if (byId("class").value) body.service_class = byId("class").value;
  return body;
}

async function answer(messages, body, signal) {
  const started = performance.now();
  const took = { first: null, usage: null, reason: null, text: "" };
  const response = await call("/v1/chat/completions", {
    ask: true,
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(request(messages)),
    signal,
  });
  try {
    for await (const chunk of events(response)) {
      took.usage = chunk.usage ?? took.usage;
      const choice = chunk.choices?.[0];
      took.reason = choice?.finish_reason ?? took.reason;
      if (!choice?.delta?.content) continue;
      took.first ??= performance.now() - started;
      took.text += choice.delta.content;
      const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
      body.textContent = took.text;
      if (atEnd) list.scrollTop = list.scrollHeight;
    }
  } catch (error) {
    error.text = took.text;
    throw error;
  }
  took.all = performance.now() - started;
  return took;
}

function describe(took) {
  const parts = [];
  if (took.usage) {
    const { completion_tokens: tokens, prompt_tokens_details: prompt } = took.usage;
    parts.push(`${tokens} tokens`);
    if (took.first !== null && tokens > 1) {
      parts.push(`${(((tokens - 1) * 1000) / Math.max(1, took.all - took.first)).toFixed(1)} per second`);
    }
    if (prompt?.cached_tokens) parts.push(`${prompt.cached_tokens} of the prompt from the cache`);
  }
  if (took.first !== null) parts.push(`first after ${(took.first / 1000).toFixed(2)} s`);
  if (took.reason === "length") parts.push("ended by the limit of tokens");
  return parts.join(" · ");
}

async function send(text) {
  running = new AbortController();
  byId("send").hidden = true;
  byId("stop").hidden = false;
  byId("clear").disabled = true;
  const asked = [...turns, { role: "user", content: text }];
  show("user", text);
  const { message, body } = show("assistant", "");
  const said = (answered) => {
    turns = answered ? [...asked, { role: "assistant", content: answered }] : turns;
  };
  try {
    const took = await answer(asked, body, running.signal);
    said(took.text);
    message.append(element("small", "took", describe(took)));
  } catch (error) {
    said(error.text);
    const stopped = error.name === "AbortError";
    message.append(element("small", stopped ? "took" : "error", stopped ? "stopped" : error.message));
  }
  list.scrollTop = list.scrollHeight;
  running = null;
  byId("send").hidden = false;
  byId("stop").hidden = true;
  byId("clear").disabled = false;
}

export function startChat() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    const text = byId("prompt").value.trim();
    if (!text || running) return;
    byId("prompt").value = "";
    send(text);
  });
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("ask").requestSubmit();
    }
  });
  byId("stop").addEventListener("click", () => running?.abort());
  byId("clear").addEventListener("click", () => {
    turns = [];
    list.querySelectorAll(".message").forEach((message) => message.remove());
    byId("hint").hidden = false;
  });
}
