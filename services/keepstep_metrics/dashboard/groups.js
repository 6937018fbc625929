// The table of groups, and the transfers. Both follow the stream.

import { el, panel, Rows, say, table, textRow } from "./dom.js";
import { age, byStableNames, bytes, clock, duration, inOrder, number, percent, plural, STATES } from "./words.js";

const COLUMNS = [
  ["group", "name"],
  ["state", ""],
  ["for", "num"],
  ["step", "num"],
  ["busy time", "num"],
  ["loss", "num"],
  ["restarts", "num"],
  ["host", ""],
  ["keepers", "copies text"],
  ["keeps", "copies num"],
  ["last error", "error"],
  ["", "orders"],
];

const MOST_ROWS = 100; // until more are wanted: a page with thousands of rows is slow
const NORMAL = new Set(["training", "standby"]);

export class Groups {
  /** `order(action, name)`; `pick(name)`. */
  constructor({ order, pick }) {
    this.order = order;
    this.pick = pick;
    this.filter = el("input", {
      type: "search",
      placeholder: "name or state",
      "aria-label": "Filter groups by name or state",
      oninput: () => this.show(this.now, this.t),
    });
    this.chips = el("ul", { class: "chips", "aria-label": "Groups by state" });
    this.counts = new Rows(this.chips, (state) => this.chip(state));
    const { body, box } = table("Groups", COLUMNS);
    this.rows = new Rows(body, (name) => this.row(name), "no matching group");
    box.classList.add("stacked");
    this.out = el("ul", { class: "chips", "aria-label": "Groups that are kept out" });
    this.kept = new Rows(this.out, (name) => this.keptOut(name), "");
    this.most = MOST_ROWS;
    const showMore = () => {
      this.most += MOST_ROWS;
      this.show(this.now, this.t);
    };
    this.more = el("button", { type: "button", class: "small", hidden: true, onclick: showMore });
    this.node = panel("Groups", el("div", { class: "bar" }, this.chips, this.filter), box, this.more, this.out);
    this.node.classList.add("full", "groups");
  }

  chip(state) {
    const count = el("b");
    const name = el("span", { class: `state ${state}` }, state);
    const filter = () => {
      this.filter.value = this.filter.value === state ? "" : state;
      this.show(this.now, this.t);
    };
    const button = el("button", { type: "button", class: "link", title: "show only these", onclick: filter }, name);
    return {
      node: el("li", {}, button, " ", count),
      update: (item) => say(count, String(item.count)),
    };
  }

  row(name) {
    const state = el("span");
    const straggler = el("span", {
      class: "badge",
      hidden: true,
      title: "its own part of a step takes much longer than that of the other groups: they wait for it",
    }, "straggler");
    const cells = COLUMNS.slice(2, -1).map(([head, kind]) => el("td", { class: kind, "data-head": head }));
    const button = (action) =>
      el("button", {
        type: "button",
        class: "small",
        "aria-label": `${action} ${name}`,
        onclick: () => this.order(action, name),
      }, action);
    const replace = button("replace");
    const node = el(
      "tr",
      {},
      el(
        "th",
        { scope: "row", class: "name" },
        el(
          "button",
          { type: "button", class: "link", title: "show its own lines", onclick: () => this.pick(name) },
          name,
        ),
        " ",
        straggler,
      ),
      el("td", {}, state),
      ...cells,
      el("td", { class: "orders" }, replace, " ", button("drain"), " ", button("evict")),
    );
    return {
      node,
      update: (group) => {
        const slow = group.straggler && group.state !== "lost";
        const idle = !slow && group.state === "waiting_quorum";
        const out = idle && this.keptNames.has(group.name);
        const waits = idle && this.now.blame && `waiting for ${this.now.blame.slow[0]}`;
        say(state, slow ? "slow" : out ? "kept out" : waits || group.state);
        state.className = `state ${slow ? "slow" : STATES.includes(group.state) ? group.state : ""}`;
        straggler.hidden = !group.straggler;
        replace.hidden = group.state === "standby" || !this.hasSpares;
        const texts = [
          age(this.t - group.since),
          number(group.step),
          duration(group.busy_seconds),
          number(group.loss),
          number(group.restarts),
          group.host,
          keepers(group.copies),
          group.copies ? bytes(group.copies.bytes) : "",
          lastError(group, this.t),
        ];
        cells.forEach((cell, i) => say(cell, texts[i]));
      },
    };
  }

  /** Whether a group stands first in a list that is too long to show at once. */
  trouble(group) {
    const exposed = Boolean(group.copies?.exposed);
    return Number(!NORMAL.has(group.state) || group.straggler || exposed || this.keptNames.has(group.name));
  }

  keptOut(name) {
    const readmit = () => this.order("readmit", name);
    const button = el(
      "button",
      { type: "button", class: "small", "aria-label": `readmit ${name}`, onclick: readmit },
      "readmit",
    );
    const node = el("li", {}, `${byStableNames(name)} is kept out `, el("span", { class: "orders" }, button));
    return { node, update: () => {} };
  }

  show(now, t) {
    if (!now) return;
    this.out.hidden = !now.kept_out.length;
    this.kept.show(now.kept_out, (name) => name);
    this.now = now;
    this.t = t;
    this.keptNames = new Set(now.kept_out);
    this.node.classList.toggle("one-copy", oneCopy(now));
    const count = Object.fromEntries(STATES.map((state) => [state, 0]));
    for (const { state } of now.groups) count[state] = (count[state] ?? 0) + 1;
    this.hasSpares = count.standby > 0;
    this.counts.show(
      STATES.filter((state) => count[state]).map((state) => ({ state, count: count[state] })),
      (one) => one.state,
    );
    const wanted = this.filter.value.trim().toLowerCase();
    const shown = now.groups.filter((one) => `${one.name} ${one.state}`.toLowerCase().includes(wanted));
    const rows = inOrder(shown);
    const more = rows.length - this.most;
    if (more > 0) rows.sort((a, b) => this.trouble(b) - this.trouble(a));
    this.rows.show(rows.slice(0, this.most), (one) => one.name);
    this.more.hidden = more <= 0;
    if (more > 0) say(this.more, `show more (${plural(more, "group")} left; groups in trouble come first)`);
  }
}

/** Returns whether the model of the job exists once. */
export const oneCopy = (now) => now.groups.some((one) => one.copies);

/** Returns who has copies of the shards of a member, and why one has none. */
function keepers(copies) {
  if (!copies) return "";
  const names = copies.keepers.join(", ") || "none";
  return copies.exposed ? `${names}; exposed: ${byStableNames(copies.exposed)}` : names;
}

/** Returns why a group was lost or failed to heal, and how long ago. */
function lastError(group, t) {
  const { error, error_at: at, failed_heals: failed } = group;
  if (!error) return "";
  const times = failed > 1 ? ` (${failed} times in a row)` : "";
  return `${age(t - at)} ago: ${error}${times}`;
}

const DONE = [
  ["group or checkpoint", "name"],
  ["what", ""],
  ["step", "num wide"],
  ["size", "num"],
  ["took", "num"],
  ["route", "wide"],
  ["ended", ""],
];

/** Progress bars of heals and uploads, and finished transfers. */
export class Heals {
  constructor() {
    const list = el("ul", { class: "heals" });
    this.rows = new Rows(list, () => bar(), "no heals or uploads in progress");
    const { body, box } = table("Finished transfers", DONE);
    this.done = new Rows(
      body,
      () =>
        textRow(
          DONE,
          (
            one,
          ) => [
            one.name,
            one.error ? `${one.kind} failed: ${one.error}` : one.kind,
            number(one.step),
            bytes(one.bytes_total ?? one.bytes_done),
            duration(one.ended - one.began),
            route(one),
            clock(one.ended),
          ],
        ),
      "none yet",
    );
    this.node = panel("Healing", list, el("h3", {}, "Finished transfers"), box);
    this.uploads = [];
  }

  showNow(now) {
    const heals = now.groups.filter((one) => one.heal).map((one) => ({ name: one.name, kind: "heal", ...one.heal }));
    this.rows.show([...heals, ...this.uploads], (one) => `${one.kind} ${one.name}`);
  }

  showTransfers(transfers) {
    this.uploads = transfers.filter((one) => one.ended == null && one.kind === "upload");
    const done = transfers.filter((one) => one.ended != null).sort((a, b) => b.ended - a.ended).slice(0, 20);
    this.done.show(done, (one) => `${one.kind} ${one.name} ${one.began}`);
  }
}

/** Returns where a transfer comes from, or goes to. A heal travels by `via`; an upload goes to this relay. */
function route({ kind, source, via }) {
  if (kind === "upload") return via ? `to ${via}` : "";
  return [source && `from ${source}`, via].filter(Boolean).join(", ");
}

function bar() {
  const [what, much] = [el("span"), el("span", { class: "num" })];
  const progress = el("progress", { max: 1 });
  return {
    node: el("li", {}, el("div", { class: "bar" }, what, much), progress),
    update: (heal) => {
      const share = heal.bytes_total ? heal.bytes_done / heal.bytes_total : null;
      if (share == null) progress.removeAttribute("value");
      else progress.value = share;
      progress.setAttribute("aria-label", `${heal.kind} of ${heal.name}`);
      say(
        what,
        `${heal.name} ${heal.kind === "heal" ? "is healing" : "is uploaded"} ${route(heal)}`,
      );
      const left = heal.seconds_left == null ? "" : `, ${duration(heal.seconds_left)} left`;
      const of = share == null ? "" : ` of ${bytes(heal.bytes_total)} (${percent(share)})`;
      say(much, `${bytes(heal.bytes_done)}${of}, ${bytes(heal.bytes_per_second)}/s${left}`);
    },
  };
}
