// The cluster page: jobs, lighthouses, their store, and registered services.

import { el, panel, Rows, say, table, textRow } from "./dom.js";
import { clock, number, percent } from "./words.js";

const REFRESH = 3_000; // ms
const JOBS = [["job", "name"], ["groups", "num"], ["step", "num"], ["goodput", "num"], ["last seen", ""]];
const LIGHTHOUSES = [["address", ""], ["role", ""], ["epoch", "num"], ["trouble", ""]];
const SERVICES = [["service", ""], ["name", ""], ["address", ""], ["details", "wide"]];

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
    this.jobRows = new Rows(found.body, jobRow, "no jobs yet");
    this.lighthouses = new Rows(
      lighthouses.body,
      () =>
        textRow(
          LIGHTHOUSES,
          (one) => [one.address, one.leader ? "leader" : "standby", number(one.epoch), one.trouble ?? ""],
        ),
      "none known",
    );
    this.services = new Rows(
      services.body,
      () => textRow(SERVICES, (one) => [one.kind, one.name, one.address, details(one.details)]),
      "none registered",
    );
    this.node = el(
      "div",
      { class: "job" },
      panel("Jobs", found.box),
      panel("Lighthouses", lighthouses.box, el("h3", {}, "Store"), this.store),
      el("section", { class: "panel full" }, el("h2", {}, "Services"), services.box),
    );
    api.follow("v1/stream", { heard: () => {}, live, signal: this.stop.signal });
    this.refresh();
    this.timer = setInterval(() => document.hidden || this.refresh(), REFRESH);
  }

  async refresh() {
    if (this.refreshing) return;
    this.refreshing = true;
    try {
      this.jobRows.show(await this.jobs(), (one) => one.job);
      const cluster = await this.api.get("v1/cluster", {}, this.stop.signal);
      this.lighthouses.show(cluster.lighthouses, (one) => one.address);
      this.services.show(cluster.services, (one) => `${one.kind} ${one.name}`);
      say(this.store, cluster.store_trouble ? `${cluster.store}: ${cluster.store_trouble}` : cluster.store);
      this.tell(null);
    } catch (error) {
      if (!this.stop.signal.aborted) this.tell(error);
    } finally {
      this.refreshing = false;
    }
  }

  close() {
    this.stop.abort();
    clearInterval(this.timer);
  }

  repaint() {}
}

function jobRow(job) {
  const cells = JOBS.slice(1).map(([, kind]) => el("td", { class: kind }));
  const node = el(
    "tr",
    {},
    el("th", { scope: "row", class: "name" }, el("a", { href: `#/job/${encodeURIComponent(job)}` }, job)),
    ...cells,
  );
  return {
    node,
    update: (one) =>
      [number(one.groups), number(one.step), percent(one.goodput), clock(one.last_seen)].forEach((text, i) =>
        say(cells[i], text)
      ),
  };
}

const details = (all) =>
  Object.entries(all ?? {}).map(([name, value]) =>
    `${name}: ${typeof value === "object" ? JSON.stringify(value) : value}`
  ).join(", ");
