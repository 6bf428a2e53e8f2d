// What the two pictures share: sharp canvases and the style sheet's colours.

export const MODES = { gpu_only: "GPU only", asymmetric: "asymmetric", same_layer: "same layer", decoupled: "decoupled" };

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

// A cleared context in CSS pixels, its width and height.
export function prepare(canvas) {
  const scale = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  return { context, width, height };
}

// Entries: [name of a colour, text].
export function legend(id, entries) {
  const items = entries.map(([name, text]) => {
    const item = document.createElement("span");
    const box = document.createElement("i");
    box.style.background = `var(--${name})`;
    item.append(box, text);
    return item;
  });
  document.getElementById(id).replaceChildren(...items);
}
