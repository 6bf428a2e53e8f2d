// Once a second: the figures of /console/state as tiles, bars, a table and the modes of the last minute.

import { MODES, colour, legend, prepare } from "./draw.js";

const SECONDS = 60;
const byId = (id) => document.getElementById(id);
const put = (id, text) => {
  byId(id).textContent = text;
};
const count = (number) => number.toLocaleString("en");
const percent = (share) => `${Math.round(100 * Math.min(1, Math.max(0, share)))} %`;
const RATES_OVER = 3; // Seconds: an iteration may last one, and counts when it ends.
const time = (ms) => (ms < 1000 ? `${count(ms)} ms` : `${count(ms / 1000)} s`);
let recent = []; // States, the last one the newest.
let history = []; // Of each second: iterations per second by mode.

export function startFigures() {
  legend("mode-legend", Object.entries(MODES));
}

export function showState(state) {
  put("model", `${state.model.name} · ${state.device} · ${count(state.model.context_tokens)} tokens of context`);
  if (recent.length && recent.at(-1).uptime_s >= state.uptime_s) [recent, history] = [[], []]; // It started anew.
  const before = recent.at(-1);
  showTiles(state, (name) => rate(recent[0], state, "counters", name));
  showBlocks(state);
  showClasses(state.classes);
  history = [...history, Object.keys(MODES).map((mode) => rate(before, state, "iterations", mode))].slice(-SECONDS);
  recent = [...recent, state].slice(-RATES_OVER);
  drawModes();
}

// Per second between two states; 0 before there are two.
function rate(before, state, group, name) {
  return before ? (state[group][name] - before[group][name]) / (state.uptime_s - before.uptime_s) : 0;
}

function showTiles(state, per) {
  const { requests, pools, classes, counters } = state;
  const tokens = per("generated_tokens");
  put("rate", tokens >= 100 ? Math.round(tokens) : tokens.toFixed(1));
  put("rate-note", `${count(Math.round(per("prefilled_tokens")))} of prompts`);
  put("running", requests.running);
  put("waiting", `${requests.waiting} queued of ${requests.max_waiting}`);
  const [busy, waits] = [per("executor_busy_s"), per("cpu_wait_s")].map((share, _, [all]) => share / Math.max(1, all));
  put("gpu-busy", percent(busy - waits));
  put("gpu-wait", `${percent(waits)} waits for CPU`);
  const sum = (key) => pools.reduce((total, pool) => total + pool[key], 0);
  const threads = sum("threads");
  put("cores", threads ? `${threads} ${threads === 1 ? "core" : "cores"}` : "none");
  const range = sum("max_threads") ? ` · ${sum("min_threads")} to ${sum("max_threads")}` : "";
  put("cpu-busy", threads ? `${percent(per("cpu_attention_s") / pools.filter((pool) => pool.threads).length)} busy${range}` : "not attached");
  const met = classes.reduce((total, each) => total + each.in_time, 0);
  const missed = classes.reduce((total, each) => total + each.late, 0);
  put("slo", met + missed ? percent(met / (met + missed)) : "–");
  put("slo-note", met + missed ? `${count(met)} met, ${count(missed)} missed` : "no targets yet");
  const prompts = counters.cached_tokens + counters.prefilled_tokens;
  put("cached", prompts ? percent(counters.cached_tokens / prompts) : "–");
  put("cached-note", `${count(counters.cached_tokens)} tokens`);
}

function bytes(number) {
  const step = Math.min(4, Math.floor(Math.log2(Math.max(1, number)) / 10));
  const value = number / 2 ** (10 * step);
  return `${value < 10 && step ? value.toFixed(1) : Math.round(value)} ${["B", "KiB", "MiB", "GiB", "TiB"][step]}`;
}

function bar(name, className, { used, total, block_bytes: size, error }) {
  const row = document.createElement("div");
  row.className = "bar";
  const track = Object.assign(document.createElement("div"), { className: "track" });
  const fill = Object.assign(document.createElement("div"), { className: `fill ${className}` });
  fill.style.width = `${total ? (100 * used) / total : 0}%`;
  track.append(fill);
  const text = error || (total ? `${count(used)} / ${count(total)} · ${bytes(used * size)}` : "none");
  row.append(name, track, Object.assign(document.createElement("span"), { className: error ? "error" : "", textContent: text }));
  return row;
}

function showBlocks({ gpu, pools }) {
  const hosts = pools.map((pool, index) => bar(pools.length > 1 ? `Host ${index}` : "Host", "host", pool));
  byId("kv").replaceChildren(bar("GPU", "gpu", gpu), ...hosts);
}

function showClasses(classes) {
  const rows = classes.map((each) => {
    const targets = each.ttft_ms === null ? "none" : `${time(each.ttft_ms)} / ${time(each.tpot_ms)}`;
    const cells = [each.name, targets, each.running, each.waiting, each.in_time, each.late, each.refused];
    const row = document.createElement("tr");
    cells.forEach((value, index) => {
      const cell = row.insertCell();
      cell.textContent = typeof value === "number" ? count(value) : value;
      if (index === 4 && value) cell.className = "met";
      if (index >= 5 && value) cell.className = "missed";
    });
    return row;
  });
  byId("classes").replaceChildren(...rows);
  const select = byId("class");
  if (select.options.length !== classes.length) {
    select.replaceChildren(...classes.map((each) => new Option(each.name, each.name, each.is_default, each.is_default)));
    byId("class-label").hidden = classes.length < 2;
  }
}

export function drawModes() {
  const { context, width, height } = prepare(byId("modes"));
  const left = 34;
  const most = Math.max(1, ...history.map((shares) => shares.reduce((sum, value) => sum + value, 0)));
  const wide = (width - left) / SECONDS;
  const bottom = height - 4;
  context.fillStyle = colour("dim");
  context.textAlign = "right";
  context.fillText(most < 10 ? most.toFixed(1) : Math.round(most), left - 6, 8);
  context.fillText("0", left - 6, bottom - 4);
  context.fillStyle = colour("line");
  context.fillRect(left, bottom, width - left, 1);
  history.forEach((shares, index) => {
    let y = bottom;
    Object.keys(MODES).forEach((mode, number) => {
      const tall = (shares[number] / most) * (bottom - 3);
      y -= tall;
      context.fillStyle = colour(mode);
      context.fillRect(width - (history.length - index) * wide, y, Math.max(1, wide - 1), tall);
    });
  });
}
