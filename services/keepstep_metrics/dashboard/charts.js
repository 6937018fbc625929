// Charts drawn by uPlot. The charts of a page share range, cursor and marks with the timeline.

import { colour, rem } from "./drawing.js";
import { roundTimes, timeText } from "./timeline.js";
import { el, say } from "./dom.js";
import { paintMarks } from "./marks.js";
import { limits, newest } from "./scales.js";
import { clock, number, plural } from "./words.js";

const HEIGHT = 7.5; // rem
const AXIS = 1.6; // rem
const RIGHT = 6; // px
const LINES = [
  { stroke: "--line-1" },
  { stroke: "--line-2", dash: [8, 4] },
  { stroke: "--line-3", dash: [2, 3] },
  { stroke: "--line-4", dash: [10, 3, 2, 3] },
];
const GROUPS = [0, 1, 2, 3, 4, 5, 6, 7, 8].map((i) => ({ stroke: `--line-${i}` })); // the mean, then the groups

export class Chart {
  /**
   * `format(value)`: for axis and legend; `axis`: whether it shows the times; `fromZero`: the axis starts at zero.
   * `range()` returns {since, until}; `zoom`: as in Timeline; `gutter()`: px at the left, as in the timeline.
   */
  constructor(title, format, { range, zoom, gutter, width, axis = false, fromZero = true, groups = false }) {
    Object.assign(this, { format, range, zoom, gutter, width, axis, fromZero });
    this.lines = groups ? GROUPS : LINES;
    this.note = el("span", { class: "dim" });
    this.buttons = el("span");
    this.body = el("div", { class: "chart" });
    this.node = el("figure", {}, el("figcaption", {}, el("b", {}, title), " ", this.note, this.buttons), this.body);
    this.names = null;
    this.marks = [];
    new ResizeObserver(() => this.plot && this.resize()).observe(this.body);
  }

  /** `x`: Unix seconds, or steps with `steps`; `lines`: {name: values}; `marks`: [{t, kind}]. */
  show(x, lines, marks, steps = false) {
    const names = Object.keys(lines);
    const columns = Object.values(lines);
    this.marks = marks;
    this.limits = limits(columns, this.fromZero);
    this.extent = [x[0] ?? 0, x.at(-1) ?? 1];
    const { clipped, highest, high } = this.limits;
    say(
      this.note,
      clipped ? `${plural(clipped, "value")} above ${this.format(high)}, the highest ${this.format(highest)}` : "",
    );
    if (!this.names || this.steps !== steps || this.names.join("\n") !== names.join("\n")) this.build(names, steps);
    this.plot.setData([x, ...columns]);
  }

  build(names, steps) {
    this.plot?.destroy();
    Object.assign(this, { names, steps });
    const shown = this.axis || steps;
    const axis = {
      stroke: () => colour("--dim"),
      grid: { stroke: () => colour("--line"), width: 1 },
      ticks: { stroke: () => colour("--line"), width: 1 },
      font: `${Math.round(0.76 * rem())}px system-ui, sans-serif`,
    };
    this.plot = new uPlot(
      {
        ...this.size(),
        padding: [6, RIGHT, shown ? 0 : 6, 0],
        cursor: {
          sync: { key: steps ? null : "keepstep" },
          drag: { x: !steps, y: false, setScale: false },
          points: { size: 6 },
        },
        scales: {
          x: { time: !steps, range: () => (steps ? this.extent : [this.range().since, this.range().until]) },
          y: { range: () => [this.limits.low, this.limits.high] },
        },
        axes: [
          {
            ...axis,
            size: shown ? AXIS * rem() : 0,
            ticks: { ...axis.ticks, show: shown },
            ...(steps ? {} : {
              splits: (_plot, _axis, since, until) => roundTimes(since, until, this.width() - RIGHT - this.gutter()),
            }),
            values: (_, ticks) => ticks.map(steps ? number : (t) => (shown ? timeText(t) : "")),
          },
          { ...axis, size: () => this.gutter(), space: 28, values: (_, ticks) => ticks.map(this.format) },
        ],
        series: [
          { label: steps ? "step" : "time", value: (plot, t) => this.xText(t ?? newest(plot.data[0])) },
          ...names.map((label, i) => ({
            ...this.lines[i % this.lines.length],
            label,
            width: i ? 1.3 : 1.9,
            stroke: () => colour(this.lines[i % this.lines.length].stroke),
            points: { show: alone },
            value: (plot, value, series, index) => this.format(index == null ? newest(plot.data[series]) : value),
          })),
        ],
        hooks: { setSelect: [(plot) => this.selected(plot)], draw: [(plot) => this.paintMarks(plot)] },
      },
      [[], ...names.map(() => [])],
      this.body,
    );
    this.plot.over.addEventListener("dblclick", () => this.zoom(null));
  }

  xText(x) {
    return x == null ? "–" : this.steps ? number(x) : clock(x);
  }

  size() {
    return { width: Math.max(100, Math.floor(this.width())) || 300, height: Math.round(HEIGHT * rem()) };
  }

  resize() {
    const size = this.size();
    if (size.width !== this.plot.width) this.plot.setSize(size);
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width > 4) this.zoom({ since: plot.posToVal(left, "x"), until: plot.posToVal(left + width, "x") });
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  paintMarks(plot) {
    const { left, top, width, height } = plot.bbox;
    paintMarks(plot.ctx, this.marks, (t) => plot.valToPos(t, "x", true), {
      from: left,
      to: left + width,
      top,
      bottom: top + height,
      scale: devicePixelRatio || 1,
    });
  }

  /** Removes the chart from the shared cursor, which would keep it alive. */
  close() {
    this.plot?.destroy();
  }

  /** Redraws in the current colours. */
  repaint() {
    if (!this.plot) return;
    this.plot.redraw(false);
    for (const [i, marker] of [...this.plot.root.querySelectorAll(".u-marker")].entries()) {
      if (i) marker.style.borderColor = colour(this.lines[(i - 1) % this.lines.length].stroke);
    }
  }
}

/** Draws points only where a line cannot: for a value between two missing ones. */
function alone(plot, series) {
  const values = plot.data[series];
  return values.filter((value) => value != null).length < 3;
}
