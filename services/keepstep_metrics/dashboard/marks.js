// Marks of events in the timeline and in every chart.

import { colour } from "./drawing.js";

export const MARKS = {
  failure: { name: "failure", colour: "--lost", dash: [] },
  heal: { name: "heal", colour: "--healing", dash: [] },
  quorum: { name: "new quorum", colour: "--dim", dash: [2, 3] },
  went_back: { name: "went back", colour: "--slow", dash: [6, 3] },
  nonfinite: { name: "not finite", colour: "--line-3", dash: [1, 2] },
};

/** Draws a vertical line for each mark. `x(t)`: its position; `from`, `to`: the columns that may be drawn on. */
export function paintMarks(context, marks, x, { from, to, top, bottom, scale = 1 }) {
  context.save();
  context.lineWidth = scale;
  for (const { t, kind } of marks) {
    const at = Math.round(x(t)) + 0.5;
    if (!MARKS[kind] || at < from || at > to) continue;
    context.strokeStyle = context.fillStyle = colour(MARKS[kind].colour);
    context.globalAlpha = kind === "quorum" ? 0.5 : 0.9;
    context.setLineDash(MARKS[kind].dash.map((one) => one * scale));
    context.beginPath();
    context.moveTo(at, top);
    context.lineTo(at, bottom);
    context.stroke();
    if (kind === "quorum") continue;
    context.beginPath(); // a flag
    context.moveTo(at - 3.5 * scale, top);
    context.lineTo(at + 3.5 * scale, top);
    context.lineTo(at, top + 6 * scale);
    context.fill();
  }
  context.restore();
}
