// The timeline of all groups on one canvas. Only visible rows are drawn, so 1,000 groups cost as much as 40.

import { el, say } from "./dom.js";
import { colour, hatch, rem, resized, shortened } from "./drawing.js";
import { MARKS, paintMarks } from "./marks.js";
import { clock, duration, percent, STATES } from "./words.js";

const RIGHT = 6; // px, as in the charts
const AXIS = 1.7; // rem; a wall screen has a larger one than a phone
const TALLEST = 1.7;
const LOWEST = 5; // px of a row
const WANTED = 0.55; // share of the window for all rows, if they fit
const LEGEND = { ...Object.fromEntries(STATES.map((state) => [state, state])), slow: "slow: the others wait for it" };
const HATCHES = {
  waiting_quorum: "dots",
  waiting_slow_group: "bars",
  healing: "up",
  retrying: "cross",
  lost: "down",
  draining: "bars",
  standby: "dots",
};
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];

export class Timeline {
  /** `zoom({since, until} | null)` sets the range; null: live. `pick(name)` selects a group. */
  constructor({ zoom, pick }) {
    this.zoom = zoom;
    this.pick = pick;
    this.groups = [];
    this.marks = [];
    this.range = { since: 0, until: 1 };
    this.row = -1;
    this.drag = null;
    this.canvas = el("canvas");
    this.spacer = el("div");
    this.told = el("p", { class: "told", "aria-live": "polite" });
    this.host = el(
      "div",
      {
        class: "timeline",
        tabindex: 0,
        role: "group",
        "aria-label":
          "Timeline of all groups. Left and right move, plus and minus zoom, 0 is live, up and down choose a group, Enter selects it.",
      },
      this.canvas,
      this.spacer,
    );
    this.context = this.canvas.getContext("2d");
    this.listen();
    this.idle();
    new ResizeObserver(() => this.draw()).observe(this.host);
  }

  static legend() {
    const items = Object.entries(LEGEND).map(([state, name]) => {
      const swatch = el("canvas", { width: 36, height: 24, "aria-hidden": "true" });
      return { state, swatch, node: el("li", {}, swatch, name) };
    });
    const flags = Object.values(MARKS).map((mark) => {
      const flag = el("i", { class: "flag", "aria-hidden": "true" });
      return { mark, flag, node: el("li", {}, flag, mark.name) };
    });
    const paint = () => {
      for (const { state, swatch } of items) {
        const context = swatch.getContext("2d");
        context.setTransform(2, 0, 0, 2, 0, 0);
        context.fillStyle = colour(`--${state}`);
        context.fillRect(0, 0, 18, 12);
        if (HATCHES[state]) context.fillStyle = hatch(context, HATCHES[state]);
        context.fillRect(0, 0, 18, 12);
      }
      for (const { mark, flag } of flags) flag.style.borderTopColor = colour(mark.colour);
    };
    paint();
    return {
      node: el(
        "ul",
        { class: "legend", "aria-label": "Colours, patterns and marks" },
        ...[...items, ...flags].map((one) => one.node),
      ),
      paint,
    };
  }

  /** `groups`: [{name, spans: [[from, to, state]], slow: [[from, to]], shares}]; `marks`: [{t, kind}]. */
  show(groups, range, marks = []) {
    this.groups = groups;
    this.marks = marks;
    this.range = range;
    this.draw();
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.paint());
  }

  get gutter() {
    return (this.host.clientWidth < 520 ? 4.6 : 7) * rem();
  }

  get axis() {
    return Math.round(AXIS * rem());
  }

  get tall() {
    const fair = (WANTED * innerHeight) / Math.max(1, this.groups.length);
    return Math.round(Math.max(LOWEST, Math.min(TALLEST * rem(), fair)));
  }

  paint() {
    const { host, canvas, context, tall, axis } = this;
    const whole = axis + tall * this.groups.length;
    const width = host.clientWidth;
    this.shape = { width, gutter: this.gutter, letter: rem() }; // read once: each reading may lay out the page
    const height = Math.min(whole, Math.max(160, Math.round(innerHeight * 0.62)));
    resized(host, `${height + 2}px`);
    resized(this.spacer, `${whole - height}px`);
    const scale = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const { gutter } = this.shape;
    const letters = Math.round(0.76 * this.shape.letter);
    context.font = `${letters}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    const fills = Object.fromEntries(Object.keys(LEGEND).map((state) => [state, colour(`--${state}`)]));
    const hatches = Object.fromEntries(Object.entries(HATCHES).map(([state, kind]) => [state, hatch(context, kind)]));
    const ink = {
      text: colour("--text"),
      dim: colour("--dim"),
      line: colour("--line"),
      on: colour("--on-state"),
      onWaiting: colour("--on-waiting"),
      row: colour("--hover"),
    };
    this.paintTimes(ink.line, (at) => context.fillRect(at, axis - 4, 1, height));
    const { scrollTop } = host;
    const first = Math.floor(scrollTop / tall);
    const last = Math.min(this.groups.length, first + Math.ceil((height - axis) / tall) + 1);
    const every = Math.max(1, Math.ceil((letters + 3) / tall)); // names of low rows would overlap
    for (let index = first; index < last; index += 1) {
      const top = axis + index * tall - scrollTop;
      if (index === this.row) {
        context.fillStyle = ink.row;
        context.fillRect(0, top, width, tall);
      }
      this.paintRow(this.groups[index], top, width, fills, hatches, ink);
      if (index % every === 0 || index === this.row) {
        context.fillStyle = index === this.row ? ink.text : ink.dim;
        context.fillText(
          shortened(context, this.groups[index].name, gutter - 10),
          4,
          top + Math.max(tall, letters) / 2,
        );
      }
    }
    paintMarks(context, this.marks, (t) => this.xOf(t), {
      from: gutter,
      to: width,
      top: axis - 4,
      bottom: height,
    });
    context.fillStyle = colour("--panel");
    context.fillRect(0, 0, width, axis - 4); // over scrolled rows
    context.textAlign = "center";
    this.paintTimes(
      ink.dim,
      (at, text) => {
        const margin = 2 * this.shape.letter;
        if (at > gutter + margin && at < width - margin) context.fillText(text, at, axis / 2 - 1);
      },
    );
    context.textAlign = "left";
    if (this.drag?.moved) {
      const [from, to] = [this.drag.from, this.drag.to].sort((a, b) => a - b);
      context.fillStyle = colour("--select");
      context.fillRect(from, axis, to - from, height);
    }
  }

  /** Position of a time; the right margin is that of the charts. */
  xOf(t) {
    const { since, until } = this.range;
    const { width, gutter } = this.shape;
    return gutter + ((t - since) / (until - since)) * (width - RIGHT - gutter);
  }

  paintRow({ spans, slow = [] }, top, width, fills, hatches, ink) {
    const { context, tall } = this;
    const { since, until } = this.range;
    const { gutter, letter } = this.shape;
    const thick = tall > 8 ? tall - 3 : tall - 1;
    const x = (t) => this.xOf(t);
    for (const [from, to, state] of spans) {
      if (to < since || from > until) continue;
      const left = Math.max(gutter, x(from));
      // A short outage must be visible: only training may be thinner than 2 px.
      const wide = Math.max(Math.min(width, x(to)) - left, state === "training" ? 0 : 2);
      context.fillStyle = fills[state] ?? "gray";
      context.fillRect(left, top, wide, thick);
      if (hatches[state] && tall > 8 && wide > 3) {
        context.fillStyle = hatches[state];
        context.fillRect(left, top, wide, thick);
      }
      if (tall >= 1.1 * letter && state !== "training" && wide > 40) {
        const long = context.measureText(state).width;
        if (long + 12 > wide) continue;
        context.fillStyle = fills[state];
        context.fillRect(left + 3, top + 2, long + 6, thick - 4); // no pattern behind text
        context.fillStyle = state.startsWith("waiting_") ? ink.onWaiting : ink.on;
        context.fillText(state, left + 6, top + thick / 2 + 0.5);
      }
    }
    context.fillStyle = fills.slow;
    for (const [from, to] of slow) {
      const left = Math.max(gutter, x(from));
      const wide = Math.max(2, Math.min(width, x(to)) - left);
      if (to < since || from > until) continue;
      context.fillRect(left, top, wide, thick);
      context.fillStyle = ink.on;
      if (tall >= 1.1 * letter && wide > 40) context.fillText("slow", left + 6, top + thick / 2 + 0.5);
      context.fillStyle = fills.slow;
    }
  }

  /** Calls `paint(x, text)` at every round time of the range. */
  paintTimes(ink, paint) {
    const { since, until } = this.range;
    this.context.fillStyle = ink;
    for (const t of roundTimes(since, until, this.shape.width - RIGHT - this.shape.gutter)) {
      paint(this.xOf(t), timeText(t));
    }
  }

  timeAt(x) {
    const { since, until } = this.range;
    return since + (Math.max(0, x - this.gutter) / (this.host.clientWidth - RIGHT - this.gutter)) * (until - since);
  }

  listen() {
    const { host } = this;
    const at = (event) => {
      const box = host.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    const choose = (x, y) => this.choose(Math.floor((y - this.axis + host.scrollTop) / this.tall), this.timeAt(x));
    host.addEventListener("scroll", () => this.draw(), { passive: true });
    host.addEventListener("keydown", (event) => this.key(event));
    host.addEventListener("pointerdown", (event) => {
      const [x, y] = at(event);
      choose(x, y); // touch sends no move event first
      if (event.button === 0 && x > this.gutter) this.drag = { from: x, to: x, moved: false };
    });
    host.addEventListener("pointermove", (event) => {
      const [x, y] = at(event);
      if (this.drag) {
        if (!this.drag.moved && Math.abs(x - this.drag.from) > 6) {
          this.drag.moved = true;
          host.setPointerCapture(event.pointerId); // not earlier: a click must stay a click
        }
        this.drag.to = x;
      }
      choose(x, y);
    });
    host.addEventListener("pointerup", (event) => {
      const drag = this.drag;
      this.drag = null;
      if (drag?.moved) this.ask(...[this.timeAt(drag.from), this.timeAt(drag.to)].sort((a, b) => a - b));
      else if (event.button === 0 && this.groups[this.row]) this.pick(this.groups[this.row].name);
      this.draw();
    });
    host.addEventListener("pointercancel", () => (this.drag = null));
    host.addEventListener("pointerleave", () => {
      if (this.drag) return;
      this.row = -1;
      this.idle();
      this.draw();
    });
    host.addEventListener("dblclick", () => this.zoom(null));
    host.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls
        event.preventDefault();
        this.zoomBy((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, this.timeAt(at(event)[0]));
      },
      { passive: false },
    );
  }

  key(event) {
    const { since, until } = this.range;
    const quarter = (until - since) / 4;
    const actions = {
      ArrowLeft: () => this.ask(since - quarter, until - quarter),
      ArrowRight: () => this.ask(since + quarter, until + quarter),
      "+": () => this.zoomBy(0.5),
      "=": () => this.zoomBy(0.5),
      "-": () => this.zoomBy(2),
      0: () => this.zoom(null),
      ArrowUp: () => this.choose(Math.max(0, this.row - 1), until),
      ArrowDown: () => this.choose(Math.min(this.groups.length - 1, this.row + 1), until),
      Enter: () => this.groups[this.row] && this.pick(this.groups[this.row].name),
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
    const top = this.row * this.tall;
    if (event.key.startsWith("Arrow") && this.row >= 0) {
      const view = this.host.clientHeight - this.axis - this.tall;
      this.host.scrollTop = Math.min(top, Math.max(top - view, this.host.scrollTop));
    }
  }

  zoomBy(factor, around = (this.range.since + this.range.until) / 2) {
    const { since, until } = this.range;
    this.ask(around - (around - since) * factor, around + (until - around) * factor);
  }

  ask(since, until) {
    this.zoom({ since, until });
  }

  /** Describes the state at this row and time. */
  choose(row, t) {
    const group = this.groups[row];
    this.row = group ? row : -1;
    const span = group?.spans.findLast(([from, to]) => from <= t && t <= to);
    const shares = Object.entries(group?.shares ?? {}).filter(([, share]) => share > 0);
    const of = shares.map(([state, share]) => `${state} ${percent(share)}`).join(", ");
    if (!group) this.idle();
    else if (span) {
      say(
        this.told,
        `${group.name}: ${span[2]} from ${clock(span[0])} for ${duration(span[1] - span[0])} · ${of}`,
      );
    } else say(this.told, `${group.name}: not running at ${clock(t)} · ${of}`);
    this.draw();
  }

  idle() {
    say(this.told, "Drag to zoom in, double-click for live. Click a group to show its own lines.");
  }
}

/** Returns round times of a range that is `width` px wide, as the timeline and the charts show them. */
export function roundTimes(since, until, width) {
  const most = Math.max(2, width / (6 * rem()));
  const step = STEPS.find((one) => (until - since) / one <= most) ?? STEPS.at(-1);
  const offset = new Date(since * 1000).getTimezoneOffset() * 60; // full hours of local time
  const times = [];
  for (let t = Math.ceil((since - offset) / step) * step + offset; t <= until; t += step) times.push(t);
  return times;
}

/** Formats a round time, without its seconds if they are 0. */
export const timeText = (t) => (t % 60 ? clock(t) : clock(t).replace(/:\d\d$/, ""));
