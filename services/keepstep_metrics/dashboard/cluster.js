// The cluster page: jobs, alerts, lighthouses, their store, and registered services.

import { el, panel, Rows, say, table, textRow } from "./dom.js";
import { colour } from "./drawing.js";
import { age, bytes, clock, duration, number, percent } from "./words.js";

const REFRESH = 3_000; // ms
const JOBS = [
  ["job", "name"],
  ["state", ""],
  ["last hour", ""],
  ["groups", "num"],
  ["step", "num"],
  ["steps/s", "num"],
  ["goodput", "num wide"],
  ["last seen", "wide"],
];
const LIGHTHOUSES = [["address", ""], ["role", ""], ["epoch", "num"], ["version", ""], ["memory", "num wide"], [
  "up for",
  "num wide",
], ["trouble", ""]];
const SERVICES = [
  ["service", ""],
  ["name", ""],
  ["address", ""],
  ["version", ""],
  ["memory", "num wide"],
  [
    "up for",
    "num wide",
  ],
  ["fill and traffic", ""],
  ["details", "wide"],
];
const SPARK = [120, 22]; // px

export class ClusterPage {
  constructor({ api, live, tell, jobs }) {
    Object.assign(this, { api, tell, jobs });
    this.stop = new AbortController();
    this.store = el("p");
    const [found, lighthouses, services] = [
      table("Jobs", JOBS),
      table("Lighthouses", LIGHTHOUSES),
      table("Services", SERVICES),
    ];
    this.states = {};
    this.jobRows = new Rows(found.body, (job) => this.jobRow(job), "no jobs yet");
    this.alertList = el("ul", { class: "alerts" });
    this.alerts = new Rows(this.alertList, () => alertRow(), "none fires");
    this.lighthouses = new Rows(lighthouses.body, () => textRow(LIGHTHOUSES, lighthouseTexts), "none known");
    this.services = new Rows(services.body, () => textRow(SERVICES, serviceTexts), "none registered");
    const full = (title, ...children) => el("section", { class: "panel full" }, el("h2", {}, title), ...children);
    this.node = el(
      "div",
      { class: "job" },
      full("Jobs", found.box),
      panel("Lighthouses", lighthouses.box, el("h3", {}, "Store"), this.store),
      panel("Alerts", this.alertList),
      full("Services", services.box),
    );
    api.follow("v1/stream", { heard: () => {}, live, signal: this.stop.signal });
    this.refresh();
    this.timer = setInterval(() => document.hidden || this.refresh(), REFRESH);
  }

  async refresh() {
    if (this.refreshing) return;
    this.refreshing = true;
    try {
      const jobs = await this.jobs();
      this.jobRows.show(jobs, (one) => one.job);
      const fires = jobs.flatMap((job) => job.alerts.map((one) => ({ ...one, job: job.job })));
      const cluster = await this.api.get("v1/cluster", {}, this.stop.signal);
      this.states = cluster.states;
      this.jobRows.show(jobs, (one) => one.job);
      this.alerts.show([...fires, ...troubles(cluster)], (one) => `${one.job} ${one.name}`);
      this.lighthouses.show(cluster.lighthouses, (one) => one.address);
      this.services.show(cluster.services, (one) => `${one.kind} ${one.name}`);
      const answers = cluster.store_seconds == null ? "" : `, a read takes ${duration(cluster.store_seconds)}`;
      say(this.store, `${cluster.store}${cluster.store_trouble ? `: ${cluster.store_trouble}` : answers}`);
      this.tell(null);
    } catch (error) {
      if (!this.stop.signal.aborted) this.tell(error);
    } finally {
      this.refreshing = false;
    }
  }

  jobRow(job) {
    const [code, why] = [el("span"), el("span", { class: "dim" })];
    const spark = el("canvas", { class: "spark", role: "img", "aria-label": `steps per second of ${job}` });
    const cells = JOBS.slice(3).map(([, kind]) => el("td", { class: kind }));
    const link = el("a", { href: `#/job/${encodeURIComponent(job)}` }, job);
    const head = el("th", { scope: "row", class: "name" }, link);
    return {
      node: el("tr", {}, head, el("td", {}, code, " ", why), el("td", {}, spark), ...cells),
      update: (one) => {
        const state = this.states[one.job];
        code.className = `code ${state?.code ?? ""}`;
        const ended = ["finished", "closed"].includes(state?.code);
        say(code, !state ? "unknown" : ended ? `${state.code} at step ${state.step}` : state.code);
        say(why, state?.why ?? "");
        paintSpark(spark, one.pace);
        const rate = state?.code === "running" ? number(one.steps_per_second) : "–";
        const texts = [number(one.groups), number(one.step), rate, percent(one.goodput), clock(one.last_seen)];
        texts.forEach((text, i) => say(cells[i], text));
      },
    };
  }

  close() {
    this.stop.abort();
    clearInterval(this.timer);
  }

  repaint() {}
}

function alertRow() {
  const [name, job, what] = [el("b"), el("span", { class: "dim" }), el("span")];
  const node = el("li", {}, name, " ", job, " ", what);
  return {
    node,
    update: (one) => {
      say(name, one.name);
      say(job, one.job);
      say(what, one.sentence);
      node.className = one.severity;
    },
  };
}

/** The alerts of `deploy/prometheus/rules.yml` about the mesh that the answer of `cluster` shows. */
function troubles(cluster) {
  const found = [];
  const add = (name, severity, sentence) => found.push({ job: "", name, severity, sentence });
  const leaders = cluster.lighthouses.filter((one) => one.leader).length;
  if (!leaders) add("NobodyLeads", "critical", "no lighthouse leads, so no quorum forms");
  if (leaders > 1) add("TwoLead", "critical", "two lighthouses lead: check that they share one store");
  if (cluster.store_trouble) add("StoreFails", "critical", cluster.store_trouble);
  for (const one of [...cluster.lighthouses, ...cluster.services]) {
    const address = `${one.kind ?? "lighthouse"} at ${one.address}`;
    if (!one.vitals) add(`ServiceIsDown ${one.address}`, "warning", `${address} does not answer`);
  }
  return found;
}

const upFor = (vitals) => (vitals?.started ? age(Date.now() / 1000 - vitals.started) : "–");
const version = (vitals) => [vitals?.version, vitals?.python && `Python ${vitals.python}`].filter(Boolean).join(", ");
const memory = (vitals) => bytes(vitals?.resident_bytes);

const lighthouseTexts = (one) => [
  one.address,
  one.leader ? "leader" : "standby",
  number(one.epoch),
  version(one.vitals),
  memory(one.vitals),
  upFor(one.vitals),
  one.trouble ?? "",
];

const serviceTexts = (one) => [
  one.kind,
  one.name,
  one.address,
  version(one.vitals),
  memory(one.vitals),
  upFor(one.vitals),
  fill(one.vitals),
  details(one.details),
];

/** Returns the fill of a relay's memory, and its traffic. */
function fill(vitals) {
  if (vitals?.limit_bytes == null) return "";
  const { used_bytes: used, limit_bytes: limit, received_per_second: received, sent_per_second: sent } = vitals;
  const traffic = received == null ? "" : `; in ${bytes(received)}/s, out ${bytes(sent)}/s`;
  return `memory ${percent(limit ? used / limit : 0)} of ${bytes(limit)}${traffic}`;
}

function paintSpark(canvas, values) {
  const scale = devicePixelRatio || 1;
  const [width, height] = SPARK;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  const most = Math.max(...values) || 1;
  pen.strokeStyle = colour("--line-1");
  pen.lineWidth = 1.4;
  pen.beginPath();
  values.forEach((value, i) => {
    pen.lineTo((i / (values.length - 1)) * (width - 2) + 1, height - 2 - (value / most) * (height - 4));
  });
  pen.stroke();
}

const details = (all) =>
  Object.entries(all ?? {}).map(([name, value]) =>
    name.endsWith("_bytes")
      ? `${name.slice(0, -"_bytes".length)}: ${bytes(value)}`
      : `${name}: ${typeof value === "object" ? JSON.stringify(value) : value}`
  ).join(", ");
