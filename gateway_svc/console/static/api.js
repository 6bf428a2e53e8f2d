// Calls of this server: with the key where it asks for one, failures as words, server-sent events as values.

const KEY = "neoflex.key";

export class Failure extends Error {
  constructor(status, message, retryAfterSeconds) {
    super(retryAfterSeconds ? `${message} Try again in ${retryAfterSeconds} s.` : message);
    this.status = status;
  }
}

const dialog = document.getElementById("key-dialog");
const keyButton = document.getElementById("key-button");
let asking = null; // One dialog, however many calls want a key.

function askForKey() {
  asking ??= new Promise((resolve) => {
    const field = document.getElementById("key");
    field.value = "";
    keyButton.hidden = false;
    const form = document.getElementById("key-form");
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, field.value.trim());
      dialog.close();
    };
    document.getElementById("key-cancel").onclick = () => dialog.close();
    dialog.onclose = () => {
      asking = null;
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}

keyButton.onclick = () => askForKey();

// Fetches; asks for a key once where it is wanted. Throws Failure, or AbortError where the signal says so.
export async function call(path, { ask = false, ...options } = {}) {
  const key = sessionStorage.getItem(KEY);
  let response;
  try {
    const headers = key ? { ...options.headers, authorization: `Bearer ${key}` } : options.headers;
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure(0, "The server can't be reached.");
  }
  if (response.ok) return response;
  if (response.status === 401 && ask) {
    await askForKey();
    if (sessionStorage.getItem(KEY) !== key) return call(path, { ...options, ask });
  }
  const body = await response.json().catch(() => null);
  throw new Failure(
    response.status,
    body?.error?.message ?? `The server answered with ${response.status}.`,
    response.headers.get("retry-after"),
  );
}

// Yields the values of a stream of server-sent events until it ends. Throws Failure for an event that says so.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (held + value).split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        const lines = part.split("\n");
        const data = lines.find((line) => line.startsWith("data: "))?.slice(6);
        if (data === undefined) continue; // A comment that keeps the connection alive.
        if (data === "[DONE]") return;
        const parsed = JSON.parse(data);
        if (parsed.error) throw new Failure(200, parsed.error.message);
        yield parsed;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
