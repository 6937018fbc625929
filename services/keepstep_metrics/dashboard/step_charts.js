// The charts of a job: recorded values, steps per second, step time.

import { Chart } from "./charts.js";
import { el } from "./dom.js";
import { byStep } from "./scales.js";
import { duration, number } from "./words.js";

const LATE = 1; // s from the end of a step to its record, at most
const MOST_VALUES = 3;

export class StepCharts {
  /** `options`: as in Chart. */
  constructor(options) {
    this.options = options;
    this.rate = new Chart("Steps per second", number, options);
    this.seconds = new Chart("Step time", duration, { ...options, axis: true });
    this.values = new Map();
    this.node = el("div", { class: "charts" }, this.rate.node, this.seconds.node);
    this.picked = null;
    this.steps = false;
  }

  get all() {
    return [...this.values.values(), this.rate, this.seconds];
  }

  /** `found`: the answer of `steps`; `until`: the end of the range. */
  show(found, until) {
    this.found = found;
    this.until = until;
    const { t, seconds, quantiles, values, marks, committed_per_second: rate } = found;
    const wide = t[1] - t[0];
    const began = found.step.findIndex((step) => step != null);
    const finished = rate.map((one, i) => (i < began || t[i] + wide > until - LATE ? null : one));
    this.rate.show(t, { "steps/s": finished }, marks);
    const picked = this.picked && seconds[this.picked] ? { [this.picked]: seconds[this.picked] } : {};
    this.seconds.show(t, { p50: quantiles.p50, p90: quantiles.p90, p99: quantiles.p99, ...picked }, marks);
    for (const name of Object.keys(values).slice(0, MOST_VALUES)) this.showValue(name);
  }

  showValue(name) {
    const { t, step, values, group_values: groups, marks } = this.found;
    if (!this.values.has(name)) this.values.set(name, this.valueChart(name));
    const chart = this.values.get(name);
    const some = Object.entries(groups[name] ?? {});
    const lines = some.length > 1 || this.picked
      ? { mean: values[name], ...Object.fromEntries(some) }
      : { [name]: values[name] };
    if (!this.steps) {
      chart.show(t, lines, marks);
      return;
    }
    const { x, columns, marks: moved } = byStep(t, step, Object.values(lines), marks);
    chart.show(x, Object.fromEntries(Object.keys(lines).map((line, i) => [line, columns[i]])), moved, true);
  }

  valueChart(name) {
    const chart = new Chart(name, number, { ...this.options, fromZero: false, groups: true });
    const button = el("button", { type: "button", class: "small", onclick: () => this.toggle() }, "by step");
    button.setAttribute("aria-pressed", String(this.steps));
    chart.buttons.append(button);
    this.node.insertBefore(chart.node, this.rate.node);
    return chart;
  }

  /** Shows recorded values over the step, or over the time. */
  toggle() {
    this.steps = !this.steps;
    for (const [name, chart] of this.values) {
      chart.buttons.firstChild.setAttribute("aria-pressed", String(this.steps));
      this.showValue(name);
    }
  }

  pick(name) {
    this.picked = name;
    if (this.found) this.show(this.found, this.until);
  }

  close() {
    for (const chart of this.all) chart.close();
  }

  repaint() {
    for (const chart of this.all) chart.repaint();
  }
}
