// Colours of the theme, patterns, and sizes for the timeline, the charts and the marks.

import { el } from "./dom.js";

/** Returns a colour of the current theme. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Returns the font size of the page in px. */
export const rem = () => parseFloat(getComputedStyle(document.documentElement).fontSize);

const made = new Map();

/** Returns a pattern, so that states differ without colours too. */
export function hatch(context, kind) {
  const ink = colour("--hatch");
  const key = `${kind} ${ink}`;
  if (!made.has(key)) {
    const tile = el("canvas", { width: 8, height: 8 });
    const pen = tile.getContext("2d");
    pen.strokeStyle = pen.fillStyle = ink;
    pen.lineWidth = 1.6;
    pen.beginPath();
    const lines = {
      up: [[-2, 2, 2, -2], [-2, 10, 10, -2], [6, 10, 10, 6]],
      down: [[-2, 6, 2, 10], [-2, -2, 10, 10], [6, -2, 10, 2]],
      bars: [[4, 0, 4, 8]],
    };
    for (const [x, y, toX, toY] of lines[kind] ?? (kind === "cross" ? [...lines.up, ...lines.down] : [])) {
      pen.moveTo(x, y);
      pen.lineTo(toX, toY);
    }
    pen.stroke();
    if (kind === "dots") pen.fillRect(3, 3, 2, 2);
    made.set(key, tile);
  }
  return context.createPattern(made.get(key), "repeat");
}

/** Shortens a text in its middle: names often differ only at their ends. */
export function shortened(context, text, wide) {
  if (context.measureText(text).width <= wide) return text;
  const cut = (letters) =>
    `${text.slice(0, letters - Math.floor(letters / 2))}…${text.slice(text.length - Math.floor(letters / 2))}`;
  let letters = text.length - 1;
  while (letters > 2 && context.measureText(cut(letters)).width > wide) letters -= 1;
  return cut(letters);
}

/** Sets a height if it differs: setting it again would lay out the page. */
export function resized(node, height) {
  if (node.style.height !== height) node.style.height = height;
}
