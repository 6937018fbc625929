// The page of one job. The stream brings `now` and the events; the history is requested when the range changes, and
// every few seconds.

import { el, panel, Rows, say, table, textRow } from "./dom.js";
import { Goodput } from "./goodput.js";
import { Groups, Heals, oneCopy } from "./groups.js";
import { Incidents } from "./incidents.js";
import { headline } from "./scales.js";
import { StepCharts } from "./step_charts.js";
import { Timeline } from "./timeline.js";
import { age, byStableNames, clock, duration, inOrder, number, percent, plural } from "./words.js";

const REFRESH = 5_000; // ms between requests for the history in the live range
const SOON = 400; // ms after an event
const SHARE = 10; // pause, as a multiple of the time of the answers: with many groups they are expensive
const MOST_EVENTS = 500;
const OWN_LINES = 8; // groups up to which the service answers with the lines of all
const itself = (name) => name;
const SHORTEST = 1; // s, smallest zoom
const SPANS = [[120, "2 min"], [900, "15 min"], [3600, "1 h"], [6 * 3600, "6 h"], [24 * 3600, "24 h"]];
const LONGEST = SPANS.at(-1)[0]; // the service has no older data
const FAILURES = [["when", ""], ["group", "name"], ["cause", ""], ["time to commit", "num wide"], [
  "time to return",
  "num",
]];
const ENDS = [["when", ""], ["group", "name"], ["host", ""], ["verdict", ""], ["evidence", ""]];
const STRAGGLERS = [["group", "name"], ["busy time", "num"], ["score", "num"], ["straggler since", ""]];

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
    this.picked = null;
    const known = about ? about.last_seen - about.first_seen : 0;
    this.span = (SPANS.find(([seconds]) => seconds >= known && seconds <= 3600) ?? SPANS[2])[0];
    this.rested = 0;
    this.fixed = null; // {since, until} of a range in the past; null: live
    this.build((action, name) => order(job, action, name)); // for this job, even if another page opens in the meantime
    api.follow(`v1/stream?job=${encodeURIComponent(job)}`, {
      heard: (kind, data) => (kind === "now" ? this.showNow(data) : kind === "event" && this.heardEvent()),
      live: (yes, pause, why) => {
        live(yes, pause, why);
        if (!yes) return;
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
    this.charts.close();
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
    this.title = el("h2", {}, `Job ${this.job}`);
    this.headline = el("p", { class: "headline", role: "status" });
    this.waiting = el("p", { class: "waiting" });
    this.hangs = el("p", { class: "waiting hangs" });
    const names = ["step", "steps/s", "loss", "last commit", "groups", "goodput"];
    this.facts = Object.fromEntries(names.map((name) => [name, el("dd")]));
    this.members = el("p", { class: "members dim" });
    const facts = el(
      "dl",
      { class: "facts" },
      ...Object.entries(this.facts).map(([name, value]) => el("div", {}, el("dt", {}, name), value)),
    );
    this.alertList = el("ul", { class: "alerts", "aria-label": "Alerts" });
    this.alerts = new Rows(this.alertList, () => alertRow(), "");
    this.timeline = new Timeline({ zoom, pick });
    this.legend = Timeline.legend();
    this.charts = new StepCharts({
      range: () => this.range,
      zoom,
      gutter: () => this.timeline.gutter,
      width: () => this.timeline.host.clientWidth,
    });
    this.groups = new Groups({ order, pick });
    this.heals = new Heals();
    this.goodput = new Goodput();
    this.log = new Incidents({ zoom, pick });
    const failures = table("Failures", FAILURES);
    this.failures = new Rows(failures.body, () => textRow(FAILURES, failureTexts), "none yet");
    const ends = table("Why groups ended", ENDS);
    this.ends = new Rows(ends.body, () => textRow(ENDS, endTexts), "no group has ended without an order");
    const stragglers = table("Stragglers", STRAGGLERS);
    this.spread = el("p", { class: "dim" });
    this.stragglers = new Rows(stragglers.body, () => textRow(STRAGGLERS, stragglerTexts), "no step times yet");
    const button = (action) =>
      el("button", { type: "button", class: "small", onclick: () => order(action, "") }, action);
    this.node = el(
      "div",
      { class: "job" },
      el(
        "section",
        { class: "panel full now" },
        el(
          "div",
          { class: "bar" },
          this.title,
          el("div", { class: "orders" }, button("verify"), " ", button("policy")),
        ),
        this.headline,
        this.waiting,
        this.hangs,
        facts,
        this.alertList,
        this.members,
      ),
      el(
        "div",
        { class: "column" },
        el(
          "section",
          { class: "panel" },
          el("div", { class: "bar" }, el("h2", {}, "Timeline"), this.ranges()),
          this.timeline.host,
          this.timeline.told,
          this.charts.node,
          this.legend.node,
        ),
      ),
      el("div", { class: "column" }, this.goodput.node, this.log.node),
      this.groups.node,
      this.heals.node,
      el(
        "div",
        { class: "column" },
        panel("Failures", failures.box),
        panel("Why groups ended", ends.box),
        panel("Slowest groups", this.spread, stragglers.box),
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
    this.charts.pick(this.picked);
    if (this.linesOf) this.refresh();
  }

  /** The group whose lines must be requested; null: none, or the answer has the lines of all groups. */
  get linesOf() {
    return this.now?.groups.length > OWN_LINES ? this.picked : null;
  }

  tick() {
    if (!this.now || document.hidden) return;
    this.groups.show(this.now, this.t);
    this.showCommit();
    if (!this.fixed) this.redrawPast();
  }

  showCommit() {
    const at = this.now.committed_at;
    say(this.facts["last commit"], at == null ? "–" : `${age(this.t - at)} ago`);
  }

  showNow(now) {
    this.now = now;
    this.nowAt = performance.now();
    say(this.title, `Job ${this.job}${oneCopy(now) ? ", one copy" : ""}`);
    say(this.headline, headline(now, plural));
    say(this.waiting, now.waiting_for ? `Next quorum: ${byStableNames(now.waiting_for)}.` : "");
    say(this.hangs, now.hangs.length ? `Held up: ${byStableNames(now.hangs.join("; "))}.` : "");
    say(this.facts.step, number(now.step));
    say(this.facts["steps/s"], number(now.steps_per_second));
    say(this.facts.loss, number(now.loss));
    const needs = now.needs == null ? "" : ` (needs ${now.needs})`;
    say(this.facts.groups, `${now.participants.length} of ${now.groups.length}${needs}`);
    const alerts = now.alerts.filter((one) => one.sentence !== now.blame?.sentence); // that one is the headline
    this.alerts.show(alerts, (one) => one.name);
    this.alertList.hidden = !alerts.length;
    this.showCommit();
    const named = (
      names,
    ) => (names.length > 12 ? `${names.slice(0, 10).join(", ")} and ${names.length - 10} more` : names.join(", "));
    const joining = now.joining.length ? `; joining: ${named(inOrder([...now.joining], itself))}` : "";
    say(
      this.members,
      now.participants.length
        ? `Quorum ${now.quorum_id}, epoch ${now.epoch}: ${named(inOrder([...now.participants], itself))}${joining}`
        : `No members${joining}`,
    );
    this.groups.show(now, now.t);
    this.heals.showNow(now);
    if (!this.fixed) this.redrawPast();
  }

  /** Draw the history and, in the live range, the state of each group since then. */
  redrawPast() {
    const groups = new Map(this.past.map((one) => [one.name, one]));
    for (const { name, state, since, straggler } of this.fixed ? [] : (this.now?.groups ?? [])) {
      const { spans = [], slow = [], shares } = groups.get(name) ?? {};
      const last = spans.at(-1);
      const end = last ? last[1] : since;
      const added = last && last[2] === state
        ? [...spans.slice(0, -1), [last[0], this.t, state]]
        : [...(last && since > end ? [...spans.slice(0, -1), [last[0], since, last[2]]] : spans), [
          Math.max(since, end),
          this.t,
          state,
        ]];
      const still = straggler && slow.length ? [...slow.slice(0, -1), [slow.at(-1)[0], this.t]] : slow;
      groups.set(name, { name, shares, slow: still, spans: added });
    }
    this.timeline.show(inOrder([...groups.values()]), this.range, this.steps?.marks);
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
      if (!this.now) {
        const now = await get("now"); // for the service's clock
        if (!this.now) this.showNow(now); // else the stream has told newer state
      }
      const { since, until } = this.range;
      const range = { since, until: this.fixed ? until : null };
      const [timeline, steps, goodput, stragglers, transfers, failures, incidents] = await Promise.all([
        get("timeline", { ...range, points: pixels(this.timeline.host) }),
        get("steps", { ...range, points: pixels(this.charts.node), group: this.linesOf }),
        get("goodput", range),
        get("stragglers"),
        get("transfers"),
        get("failures", { limit: 50 }),
        this.incidents(),
      ]);
      this.past = timeline.groups;
      this.steps = { ...steps, until };
      this.redrawPast();
      this.showSteps();
      this.goodput.show(goodput);
      const waited = goodput.shares.waiting_slow_group;
      const slow = waited >= 0.01 ? `, ${percent(waited)} waits for slow groups` : "";
      say(this.facts.goodput, `${percent(goodput.goodput)}${slow}`);
      say(
        this.spread,
        stragglers.median_seconds == null
          ? "Fewer than three groups have step times: none is compared with the others."
          : `Median busy time per step ${duration(stragglers.median_seconds)}, median deviation ${
            duration(stragglers.mad_seconds)
          }.`,
      );
      this.stragglers.show(
        [...stragglers.groups].sort((a, b) => (b.seconds ?? 0) - (a.seconds ?? 0)).slice(0, 10),
        (one) => one.name,
      );
      this.heals.showTransfers(transfers.transfers);
      this.failures.show([...failures.failures].sort((a, b) => b.t - a.t), (one) => `${one.t} ${one.name}`);
      this.ends.show(failures.ends, (one) => `${one.t} ${one.name}`);
      this.log.show(incidents);
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
    this.charts.show(this.steps, this.steps.until);
  }

  heardEvent() {
    clearTimeout(this.soon);
    this.soon = setTimeout(() => this.refreshSoon(), SOON);
  }

  /** Shows the new events at once, and the rest when it is due. */
  async refreshSoon() {
    if (this.fixed || document.hidden) return;
    try {
      this.log.show(await this.incidents());
    } catch (error) {
      if (!this.stop.signal.aborted) this.tell(error);
    }
    if (performance.now() >= this.rested) this.refresh();
  }

  /** The events of a range in the past, else the newest ones. */
  async incidents() {
    const { since, until } = this.fixed ?? { since: this.t - LONGEST, until: null };
    const query = { since, until, limit: MOST_EVENTS };
    return (await this.api.get(`${this.path}/incidents`, query, this.stop.signal)).incidents;
  }

  repaint() {
    this.legend.paint();
    this.timeline.draw();
    this.charts.repaint();
  }
}

/** Points to request for a chart of this width. */
const pixels = (node) => Math.max(100, Math.min(1000, Math.round(node.clientWidth)));

function alertRow() {
  const [name, what] = [el("b"), el("span")];
  const node = el("li", {}, name, " ", what);
  return {
    node,
    update: (one) => {
      say(name, one.name);
      say(what, one.sentence);
      node.className = one.severity;
    },
  };
}

const failureTexts = (one) => [
  clock(one.t),
  one.name,
  one.cause,
  duration(one.seconds_to_commit),
  one.recovered_at == null ? "not back yet" : duration(one.seconds_to_return),
];

const endTexts = (one) => [clock(one.t), one.name, one.host || "–", one.verdict, byStableNames(one.reason)];

const stragglerTexts = (one) => [
  one.name,
  duration(one.seconds),
  one.score.toFixed(1).replace("-0.0", "0.0"),
  one.straggler ? clock(one.since) : "no",
];
