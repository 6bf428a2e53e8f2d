// The latest iterations as lanes over time: mode, GPU, links, CPU attention; and a piece of the last one, enlarged, in
// which layers show. What waits is left blank.

import { MODES, colour, legend, prepare } from "./draw.js";

const KEPT = 8;
const PIXELS_EACH = 105; // An iteration narrower than this shows nothing of its layers.
const LEFT = 38;
const LANES = [
  ["GPU", "gpu", 26, 40],
  ["links", "links", 72, 16],
  ["CPU", "cpu", 94, 40],
];
const ENLARGED_SHARE = 0.1;
const ENLARGED_SHIFT = -22; // There is no lane of modes.
const canvas = document.getElementById("timeline");
const enlarged = document.getElementById("enlarged");
const note = document.getElementById("timeline-note");
let kept = [];
let drawing = false;

export function startTimeline() {
  legend("lane-legend", [
    ["linear-0", "linear, sub-batch 0"],
    ["attention-0", "its attention"],
    ["linear-1", "linear, sub-batch 1"],
    ["attention-1", "its attention"],
    ["linear-2", "linear, cohort"],
    ["attention-2", "its attention"],
    ["other", "other, copies"],
    ["lane", "waits or idle"],
  ]);
}

export function addIteration(iteration) {
  const last = kept.at(-1);
  // A run of neighbours, in which time is true: after a gap a new one begins.
  const follows = last && last.epoch === iteration.epoch && last.iteration + 1 === iteration.iteration;
  kept = [...(follows ? kept : []), iteration].slice(-KEPT);
  canvas.dataset.iterations = Number(canvas.dataset.iterations ?? 0) + 1;
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    drawTimeline();
  });
}

export function sayTimeline(text) {
  note.textContent = text;
}

export function drawTimeline() {
  const { context, width, height } = prepare(canvas);
  drawLanes(context, width, 0);
  context.fillText("mode", 0, 12);
  drawEnlarged();
  if (!kept.length) return;
  const shown = kept.slice(-Math.max(2, Math.floor((width - LEFT) / PIXELS_EACH)));
  const placed = place(shown);
  const scale = (width - LEFT) / placed.at(-1).end;
  for (const { iteration, start } of placed) {
    drawIteration(context, iteration, LEFT + start * scale, scale);
  }
  drawAxis(context, width, height, "0", placed.at(-1).end);
  describe(shown);
}

function drawEnlarged() {
  const { context, width, height } = prepare(enlarged);
  drawLanes(context, width, ENLARGED_SHIFT);
  const last = kept.at(-1);
  if (!last) return;
  const lasts = Math.max(1, last.duration_us * ENLARGED_SHARE);
  // Where the CPU is in the middle of its work, if it has some.
  const first = last.cpu[0] ?? [];
  const middle = first[Math.floor(first.length / 2)]?.[2] ?? last.duration_us / 2;
  const start = Math.max(0, Math.min(last.duration_us - lasts, middle - lasts / 2));
  const scale = (width - LEFT) / lasts;
  context.save();
  context.beginPath();
  context.rect(LEFT, 0, width - LEFT, height);
  context.clip();
  drawSegments(context, last, LEFT - start * scale, scale, ENLARGED_SHIFT);
  context.restore();
  drawAxis(context, width, height, "a piece of the last one, enlarged", lasts);
}

function drawLanes(context, width, shift) {
  for (const [name, , top, tall] of LANES) {
    context.fillStyle = colour("lane");
    context.fillRect(LEFT, top + shift, width - LEFT, tall);
    context.fillStyle = colour("dim");
    context.textAlign = "left";
    context.fillText(name, 0, top + shift + tall / 2);
  }
}

function drawAxis(context, width, height, start, lastsUs) {
  context.fillStyle = colour("dim");
  context.textAlign = "left";
  context.fillText(start, LEFT, height - 7);
  context.textAlign = "right";
  context.fillText(`${(lastsUs / 1000).toFixed(1)} ms`, width, height - 7);
}

// Microseconds from the left, the executor's idle time between two iterations shortened to half of the longer one.
function place(shown) {
  let end = 0;
  return shown.map((iteration, index) => {
    const before = shown[index - 1];
    const idle = before ? iteration.start_us - before.start_us - before.duration_us : 0;
    const start = end + Math.max(0, Math.min(idle, Math.max(iteration.duration_us, before?.duration_us ?? 0) / 2));
    end = start + iteration.duration_us;
    return { iteration, start, end };
  });
}

function drawIteration(context, iteration, x, scale) {
  const wide = iteration.duration_us * scale;
  context.fillStyle = colour(iteration.mode);
  context.fillRect(x, 4, Math.max(1, wide - 1), 16);
  context.fillStyle = colour("card");
  context.textAlign = "center";
  const name = MODES[iteration.mode] ?? iteration.mode;
  if (context.measureText(name).width < wide - 6) context.fillText(name, x + wide / 2, 12.5);
  drawSegments(context, iteration, x, scale, 0);
  context.fillStyle = colour("dim");
  context.fillRect(x, 4, 1, LANES.at(-1)[2] + LANES.at(-1)[3] - 4);
}

function drawSegments(context, iteration, x, scale, shift) {
  const colours = {}; // Asking the style sheet for each of thousands takes long.
  for (const [, key, top, tall] of LANES) {
    const rows = key === "cpu" ? iteration.cpu : [iteration[key]];
    const each = tall / Math.max(1, rows.length);
    rows.forEach((row, index) => {
      for (const [what, subBatch, start, lasts] of row) {
        const name = what === "linear" || what === "attention" ? `${what}-${Math.max(0, subBatch)}` : "other";
        context.fillStyle = colours[name] ??= colour(name);
        context.fillRect(x + start * scale, top + shift + index * each, Math.max(0.25, lasts * scale), each);
      }
    });
  }
}

function describe(shown) {
  const last = shown.at(-1);
  const lasted = (lane) => lane.reduce((sum, segment) => sum + segment[3], 0);
  const share = (lane) => `${Math.round((100 * lasted(lane)) / Math.max(1, last.duration_us))} %`;
  const ms = (us) => `${(us / 1000).toFixed(1)} ms`;
  const predicted = last.predicted_us ? ` (predicted ${ms(last.predicted_us)})` : "";
  const holds = [
    last.prefill_tokens && `${last.prefill_tokens} prompt tokens`,
    last.gpu_decodes && `${last.gpu_decodes} decoded on the GPU`,
    last.cpu_decodes && `${last.cpu_decodes} on the CPU`,
  ].filter(Boolean);
  note.textContent =
    `Iteration ${last.iteration}, ${MODES[last.mode] ?? last.mode}: ${ms(last.duration_us)}${predicted}, ` +
    `GPU ${share([...last.gpu, ...last.links])} busy, CPU attention ${last.cpu.map(share).join(" and ") || "0 %"}; ${holds.join(", ") || "no tokens"}`;
}
