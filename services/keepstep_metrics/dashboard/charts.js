// Charts over time, drawn by uPlot. The charts of a page share range and cursor.

import { colour, rem } from "./timeline.js";
import { el } from "./dom.js";
import { clock } from "./words.js";

const HEIGHT = 12; // rem
const LINES = [
  { stroke: "--line-1" },
  { stroke: "--line-2", dash: [8, 4] },
  { stroke: "--line-3", dash: [2, 3] },
  { stroke: "--line-4", dash: [10, 3, 2, 3] },
];
const RATIO = 0.92;

export class Chart {
  /** `names`: of the lines; `format(value)`: for axis and legend; `range()` returns {since, until}; `zoom`: as in Timeline. */
  constructor(title, names, format, { range, zoom }) {
    this.body = el("div", { class: "chart" });
    this.node = el("figure", {}, el("figcaption", {}, title), this.body);
    const axis = {
      stroke: () => colour("--dim"),
      grid: { stroke: () => colour("--line"), width: 1 },
      ticks: { stroke: () => colour("--line"), width: 1 },
      font: `${Math.round(0.76 * rem())}px system-ui, sans-serif`,
    };
    this.plot = new uPlot(
      {
        width: 300,
        height: HEIGHT * rem(),
        cursor: { sync: { key: "keepstep" }, drag: { x: true, y: false, setScale: false }, points: { size: 6 } },
        scales: { x: { time: true, range: () => [range().since, range().until] }, y: { range: near } },
        axes: [
          {
            ...axis,
            values: [[3600, "{HH}:{mm}"], [60, "{HH}:{mm}"], [1, "{HH}:{mm}:{ss}"]].map((
              [step, text],
            ) => [step, text, null, null, null, null, null, null, 1]),
          },
          { ...axis, size: 4.4 * rem(), values: (_, ticks) => ticks.map(format) },
        ],
        series: [
          { label: "time", value: (_, t) => clock(t) },
          ...names.map((label, i) => ({
            ...LINES[i],
            label,
            width: 1.8,
            stroke: () => colour(LINES[i].stroke),
            points: { show: alone },
            value: (_, v) => format(v),
          })),
        ],
        hooks: {
          setSelect: [
            (plot) => {
              const { left, width } = plot.select;
              if (width > 4) zoom({ since: plot.posToVal(left, "x"), until: plot.posToVal(left + width, "x") });
              plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            },
          ],
        },
      },
      [[], ...names.map(() => [])],
      this.body,
    );
    this.plot.over.addEventListener("dblclick", () => zoom(null));
    this.names = names;
    new ResizeObserver(([{ contentRect }]) => {
      if (contentRect.width) this.plot.setSize({ width: Math.floor(contentRect.width), height: HEIGHT * rem() });
    }).observe(this.body);
  }

  /** Columns: Unix seconds, and one list per line, in the order of `names`. */
  show(t, ...columns) {
    this.plot.setData([t, ...columns.map((one) => one ?? t.map(() => null))]);
  }

  /** Removes the chart from the shared cursor, which would keep it alive. */
  close() {
    this.plot.destroy();
  }

  /** Renames a line; a line without a name is not in the legend. */
  rename(index, label) {
    const cell = this.plot.root.querySelectorAll(".u-legend .u-label")[index + 1];
    cell.textContent = label ?? "";
    cell.closest(".u-series").hidden = !label;
  }

  /** Redraws in the current colours. */
  repaint() {
    this.plot.redraw(false);
    for (const [i, marker] of [...this.plot.root.querySelectorAll(".u-marker")].entries()) {
      if (i) marker.style.borderColor = colour(LINES[i - 1].stroke);
    }
  }
}

/** Draws points only where a line cannot: for a value between two missing ones. */
function alone(plot, series) {
  const values = plot.data[series];
  return values.filter((value) => value != null).length < 3;
}

/** Starts the axis at zero, unless all values are close together and far from zero. */
function near(_, low, high) {
  if (low == null) return [0, 1];
  const from = low > 0 && low / high > RATIO ? low - (high - low || low) * 0.2 : Math.min(0, low);
  return [from, high + (high - from || 1) * 0.1];
}
