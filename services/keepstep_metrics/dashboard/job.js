// The page of one job. The stream brings `now` and the events; the history is requested when the range changes, and
// every few seconds.

import { Chart } from "./charts.js";
import { el, panel, Rows, say, table, textRow } from "./dom.js";
import { Groups, Heals } from "./groups.js";
import { Timeline } from "./timeline.js";
import { byName, byStableNames, clock, duration, number, percent, plural, stateName, STATES } from "./words.js";

const REFRESH = 5_000; // ms between requests for the history in the live range
const SOON = 400; // ms after an event
const SHARE = 10; // pause, as a multiple of the time of the answers: with many groups they are expensive
const MOST_EVENTS = 200;
const LATE = 1; // s from the end of a step to its record, at most
const SHORTEST = 1; // s, smallest zoom
const MOST_VALUES = 3; // charts of recorded values
const SPANS = [[120, "2 min"], [900, "15 min"], [3600, "1 h"], [6 * 3600, "6 h"], [24 * 3600, "24 h"]];
const LONGEST = SPANS.at(-1)[0]; // the service has no older data
const FAILURES = [["when", ""], ["group", "name"], ["cause", ""], ["next commit after", "num wide"], [
  "group back after",
  "num",
]];
const STRAGGLERS = [["group", "name"], ["step time", "num"], ["score", "num"], ["straggler since", ""]];

export class JobPage {
  /**
   * `about`: the entry of /v1/jobs, if the job exists. `tell(error or null)` shows an error;
   * `order(job, action, name)` asks for confirmation and sends the order.
   */
  constructor({ api, job, about, order, live, tell }) {
    Object.assign(this, { api, job, tell });
    this.path = `v1/jobs/${encodeURIComponent(job)}`;
    this.stop = new AbortController();
    this.now = null;
    this.past = [];
    this.events = new Map();
    this.picked = null;
    const known = about ? about.last_seen - about.first_seen : 0;
    this.span = (SPANS.find(([seconds]) => seconds >= known && seconds <= 3600) ?? SPANS[2])[0];
    this.rested = 0;
    this.fixed = null; // {since, until} of a range in the past; null: live
    this.build((action, name) => order(job, action, name)); // for this job, even if another page opens in the meantime
    api.follow(`v1/stream?job=${encodeURIComponent(job)}`, {
      heard: (kind, data) => (kind === "now" ? this.showNow(data) : kind === "event" && this.heardEvent(data)),
      live: (yes, pause, why) => {
        live(yes, pause, why);
        if (!yes) return;
        this.events.clear(); // a service that lost its data numbers events from 1
        this.refresh(); // events during the interruption
      },
      signal: this.stop.signal,
    });
    this.timers = [
      setInterval(() => this.fixed || performance.now() < this.rested || this.refresh(), REFRESH),
      setInterval(() => this.tick(), 1000),
    ];
  }

  close() {
    this.stop.abort();
    this.timers.forEach(clearInterval);
    clearTimeout(this.soon);
    for (const chart of this.allCharts) chart.close();
  }

  get allCharts() {
    return [this.seconds, this.rate, ...this.values.values()];
  }

  /** Unix time by the service's clock: the clock of this machine may be wrong. */
  get t() {
    return this.now ? this.now.t + (performance.now() - this.nowAt) / 1000 : Date.now() / 1000;
  }

  get range() {
    return this.fixed ?? { since: this.t - this.span, until: this.t };
  }

  build(order) {
    const zoom = (range) => this.zoom(range);
    const pick = (name) => this.pick(name);
    this.headline = el("p", { class: "headline" });
    this.waiting = el("p", { class: "waiting" });
    this.facts = Object.fromEntries(["step", "quorum", "epoch", "members", "goodput"].map((name) => [name, el("dd")]));
    this.members = el("p", { class: "members" });
    const facts = el(
      "dl",
      { class: "facts" },
      ...Object.entries(this.facts).map(([name, value]) => el("div", {}, el("dt", {}, name), value)),
    );
    this.timeline = new Timeline({ zoom, pick });
    this.legend = Timeline.legend();
    this.seconds = new Chart("Step time", ["p50", "p90", "p99", ""], duration, { range: () => this.range, zoom });
    this.seconds.rename(3, null);
    this.rate = new Chart("Committed steps per second", ["steps/s"], number, { range: () => this.range, zoom });
    this.values = new Map();
    this.charts = el("div", { class: "charts" }, this.seconds.node, this.rate.node);
    this.zoomOf = { zoom, range: () => this.range };
    this.groups = new Groups({ order, pick });
    this.heals = new Heals();
    const failures = table("Failures", FAILURES);
    this.failures = new Rows(
      failures.body,
      () =>
        textRow(
          FAILURES,
          (
            one,
          ) => [
            clock(one.t),
            one.name,
            one.cause,
            duration(one.seconds_to_commit),
            one.recovered_at == null ? "not back yet" : duration(one.seconds_to_return),
          ],
        ),
      "none yet",
    );
    const stragglers = table("Stragglers", STRAGGLERS);
    this.spread = el("p", { class: "dim" });
    this.stragglers = new Rows(
      stragglers.body,
      () =>
        textRow(
          STRAGGLERS,
          (
            one,
          ) => [
            one.name,
            duration(one.seconds),
            one.score.toFixed(1).replace("-0.0", "0.0"),
            one.straggler ? clock(one.since) : "no",
          ],
        ),
      "no step times yet",
    );
    this.log = el("ol", { class: "events", reversed: true });
    this.logRows = new Rows(this.log, () => eventRow(), "none yet");
    this.node = el(
      "div",
      { class: "job" },
      el(
        "section",
        { class: "panel now" },
        el("h2", {}, `Job ${this.job}`),
        this.headline,
        this.waiting,
        facts,
        this.members,
      ),
      this.goodputPanel(),
      el(
        "section",
        { class: "panel full" },
        el("div", { class: "bar" }, el("h2", {}, "Timeline"), this.ranges()),
        this.timeline.host,
        this.timeline.told,
        this.legend.node,
      ),
      el("section", { class: "panel full" }, el("h2", {}, "Steps"), this.charts),
      this.groups.node,
      this.heals.node,
      panel("Failures", failures.box),
      panel("Slowest groups", this.spread, stragglers.box),
      el(
        "section",
        { class: "panel full" },
        el("h2", {}, "Events"),
        el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Events" }, this.log),
      ),
    );
  }

  ranges() {
    const button = (text, label, onclick) =>
      el("button", { type: "button", class: "small", "aria-label": label, onclick }, text);
    this.spanButtons = SPANS.map((
      [seconds, text],
    ) => [seconds, button(text, `the last ${text}`, () => ((this.span = seconds), this.zoom(null)))]);
    const zoomBy = (factor) => () => this.timeline.zoomBy(factor);
    const rest = [button("+", "zoom in", zoomBy(0.5)), button("−", "zoom out", zoomBy(2))];
    const group = el(
      "div",
      { class: "ranges", role: "group", "aria-label": "Time range" },
      ...this.spanButtons.map(([, node]) => node),
      ...rest,
    );
    this.markRange();
    return group;
  }

  markRange() {
    for (const [seconds, node] of this.spanButtons) {
      node.setAttribute("aria-pressed", String(!this.fixed && seconds === this.span));
    }
  }

  goodputPanel() {
    this.good = el("p", { class: "big" });
    this.stack = el("div", { class: "stack", "aria-hidden": "true" });
    this.shares = new Rows(el("ul", { class: "shares" }), (state) => {
      const [share, time] = [el("b"), el("span", { class: "dim" })];
      const node = el("li", {}, el("span", { class: `state ${state}` }, stateName(state)), share, time);
      return { node, update: (one) => (say(share, percent(one.share)), say(time, duration(one.seconds))) };
    });
    this.counted = el("p", { class: "dim" });
    return panel("Goodput and lost time", this.good, this.stack, this.shares.parent, this.counted);
  }

  /** Null is the live range. Another range is moved into the time that the service has data for. */
  zoom(range) {
    if (range) {
      const wide = Math.min(range.until - range.since, LONGEST);
      if (!(wide >= SHORTEST)) return;
      const until = Math.min(this.t, Math.max(range.until, this.t - LONGEST + wide));
      range = { since: until - wide, until };
    }
    this.fixed = range;
    this.markRange();
    this.redrawPast();
    this.refresh();
  }

  pick(name) {
    this.picked = this.picked === name ? null : name;
    this.seconds.rename(3, this.picked);
    this.showSteps();
  }

  tick() {
    if (!this.now || document.hidden) return;
    this.groups.show(this.now, this.t);
    if (!this.fixed) this.redrawPast();
  }

  showNow(now) {
    this.now = now;
    this.nowAt = performance.now();
    const stuck = Object.entries(Object.groupBy(now.groups, (one) => one.state)).filter(([state]) =>
      state !== "training"
    );
    const others = stuck.map(([state, groups]) =>
      `${groups.length === 1 ? groups[0].name : plural(groups.length, "group")} ${groups.length === 1 ? "is" : "are"} ${
        stateName(state)
      }`
    );
    const told = `${now.participants.length} of ${plural(now.groups.length, "group")} in the quorum${
      others.length ? `; ${others.join(", ")}` : ", all training"
    }.`;
    say(this.headline, now.groups.length ? told : "No group is running.");
    say(this.waiting, `Next quorum: ${byStableNames(now.waiting_for ?? "not waiting")}.`);
    say(this.facts.step, number(now.step));
    say(this.facts.quorum, number(now.quorum_id));
    say(this.facts.epoch, number(now.epoch));
    say(
      this.facts["members"],
      `${now.participants.length}${now.joining.length ? ` + ${now.joining.length} joining` : ""}`,
    );
    const named = (
      names,
    ) => (names.length > 12 ? `${names.slice(0, 10).join(", ")} and ${names.length - 10} more` : names.join(", "));
    const joining = now.joining.length ? `; joining: ${named([...now.joining].sort(byName))}` : "";
    say(
      this.members,
      now.participants.length
        ? `Members: ${named([...now.participants].sort(byName))}${joining}`
        : `No members${joining}`,
    );
    this.groups.show(now, now.t);
    this.heals.showNow(now);
    if (!this.fixed) this.redrawPast();
  }

  /** Draw the history and, in the live range, the state of each group since then. */
  redrawPast() {
    const groups = new Map(this.past.map((one) => [one.name, one]));
    for (const { name, state, since } of this.fixed ? [] : (this.now?.groups ?? [])) {
      const { spans = [], shares } = groups.get(name) ?? {};
      const last = spans.at(-1);
      const end = last ? last[1] : since;
      const added = last && last[2] === state
        ? [...spans.slice(0, -1), [last[0], this.t, state]]
        : [...(last && since > end ? [...spans.slice(0, -1), [last[0], since, last[2]]] : spans), [
          Math.max(since, end),
          this.t,
          state,
        ]];
      groups.set(name, { name, shares, spans: added });
    }
    this.timeline.show([...groups.values()].sort((a, b) => byName(a.name, b.name)), this.range);
    if (!this.stepsShownAt || performance.now() - this.stepsShownAt > 900 || this.fixed) this.showSteps();
  }

  async refresh() {
    if (document.hidden) return;
    if (this.refreshing) {
      this.again = true;
      return;
    }
    this.refreshing = true;
    const began = performance.now();
    const get = (what, query) => this.api.get(`${this.path}/${what}`, query, this.stop.signal);
    try {
      if (!this.now) this.showNow(await get("now")); // for the service's clock
      const { since, until } = this.range;
      const range = { since, until: this.fixed ? until : null };
      const [timeline, steps, goodput, stragglers, transfers, failures, events] = await Promise.all([
        get("timeline", { ...range, points: pixels(this.timeline.host) }),
        get("steps", { ...range, points: pixels(this.seconds.body) }),
        get("goodput", range),
        get("stragglers"),
        get("transfers"),
        get("failures", { limit: 50 }),
        get("events", { limit: MOST_EVENTS }),
      ]);
      this.past = timeline.groups;
      this.steps = { ...steps, until };
      this.redrawPast();
      this.showSteps();
      this.showGoodput(goodput);
      say(
        this.spread,
        `Median step time ${duration(stragglers.median_seconds)}, median deviation ${
          duration(stragglers.mad_seconds)
        }.`,
      );
      this.stragglers.show(
        [...stragglers.groups].sort((a, b) => (b.seconds ?? 0) - (a.seconds ?? 0)).slice(0, 10),
        (one) => one.name,
      );
      this.heals.showTransfers(transfers.transfers);
      this.failures.show([...failures.failures].sort((a, b) => b.t - a.t), (one) => `${one.t} ${one.name}`);
      this.showEvents(events.events);
      this.tell(null);
    } catch (error) {
      if (!this.stop.signal.aborted) this.tell(error);
    } finally {
      this.refreshing = false;
      this.rested = performance.now() + SHARE * (performance.now() - began);
      if (this.again) {
        this.again = false;
        this.refresh();
      }
    }
  }

  showSteps() {
    if (!this.steps) return;
    this.stepsShownAt = performance.now();
    const { t, until, seconds, quantiles, values, committed_per_second: rate } = this.steps;
    const wide = t[1] - t[0];
    this.seconds.show(t, quantiles.p50, quantiles.p90, quantiles.p99, seconds[this.picked]);
    this.rate.show(t, rate.map((one, i) => (t[i] + wide > until - LATE ? null : one))); // not of an unfinished point
    for (const name of Object.keys(values).slice(0, MOST_VALUES)) {
      if (!this.values.has(name)) {
        const chart = new Chart(name, [name], number, this.zoomOf);
        this.values.set(name, chart);
        this.charts.append(chart.node);
      }
      this.values.get(name).show(t, values[name]);
    }
  }

  showGoodput(found) {
    say(this.good, percent(found.goodput));
    say(this.facts.goodput, percent(found.goodput));
    const states = Object.keys(STATES).filter((state) => found.shares[state] > 0);
    this.stack.replaceChildren(
      ...states.map((state) => {
        const part = el("span", { class: `state ${state}` });
        part.style.flexGrow = found.shares[state];
        return part;
      }),
    );
    this.shares.show(
      states.map((state) => ({ state, share: found.shares[state], seconds: found.seconds[state] })),
      (one) => one.state,
    );
    const mean = (text, seconds) => (seconds == null ? "" : `; ${text} ${duration(seconds)} on average`);
    const commit = mean("next commit after", found.mean_time_to_recover);
    say(
      this.counted,
      `${found.steps_committed} group steps committed, ${found.steps_discarded} discarded; ${
        plural(found.failures, "failure")
      }${commit}${mean("group back after", found.mean_time_to_return)}.`,
    );
  }

  heardEvent(event) {
    this.showEvents([event]);
    clearTimeout(this.soon);
    this.soon = setTimeout(() => this.fixed || this.refresh(), Math.max(SOON, this.rested - performance.now()));
  }

  showEvents(events) {
    for (const one of events) this.events.set(one.id, one);
    const newest = [...this.events.values()].sort((a, b) => b.id - a.id).slice(0, MOST_EVENTS);
    this.events = new Map(newest.map((one) => [one.id, one]));
    this.logRows.show(newest, (one) => one.id);
  }

  repaint() {
    this.legend.paint();
    this.timeline.draw();
    for (const chart of this.allCharts) chart.repaint();
  }
}

/** Points to request for a chart of this width. */
const pixels = (node) => Math.max(100, Math.min(1000, Math.round(node.clientWidth)));

function eventRow() {
  const [when, kind, what] = [el("time"), el("code"), el("span")];
  const node = el("li", {}, when, kind, what);
  return {
    node,
    update: (one) => (say(when, clock(one.t)), say(kind, one.event), say(what, one.sentence || one.name || "")),
  };
}
