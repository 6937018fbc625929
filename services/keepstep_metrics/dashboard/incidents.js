// The log of a job: events that belong together in one line, with a filter.

import { el, Rows, say } from "./dom.js";
import { byStableNames, clock, plural } from "./words.js";

const MOST = 200;
const AROUND = 30; // s before and after an incident

export class Incidents {
  /** `zoom({since, until})`; `pick(name)` selects a group. */
  constructor({ zoom, pick }) {
    this.zoom = zoom;
    this.pick = pick;
    this.filter = el("input", {
      type: "search",
      placeholder: "kind, group or text",
      "aria-label": "Filter events by kind, group or text",
      oninput: () => this.show(this.found),
    });
    this.list = el("ol", { class: "events" });
    this.rows = new Rows(this.list, () => this.row(), "none");
    this.found = [];
    this.node = el(
      "section",
      { class: "panel" },
      el("div", { class: "bar" }, el("h2", {}, "Events"), this.filter),
      el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Events" }, this.list),
    );
  }

  row() {
    let item = null;
    const when = el("button", {
      type: "button",
      class: "link",
      title: "show this time in the timeline and in the charts",
      onclick: () => this.zoom({ since: item.t - AROUND, until: item.until + AROUND }),
    });
    const kind = el("code");
    const name = el("button", {
      type: "button",
      class: "link",
      title: "show this group",
      onclick: () => this.pick(item.name),
    });
    const what = el("span");
    const more = el("summary", { class: "dim" });
    const parts = el("div");
    const details = el("details", {}, more, parts);
    return {
      node: el("li", {}, when, kind, el("div", {}, name, what, details)),
      update: (one) => {
        one = { ...one, sentence: byStableNames(one.sentence) };
        const changed = item?.events.length !== one.events.length;
        item = one;
        say(when, clock(one.t));
        say(kind, one.kind);
        kind.className = one.away ? "away" : "";
        const named = one.name && one.sentence.startsWith(`${one.name} `);
        name.hidden = !named;
        say(name, named ? one.name : "");
        say(what, `${named ? one.sentence.slice(one.name.length) : one.sentence}${one.away ? " (not back yet)" : ""}`);
        details.hidden = one.events.length < 2;
        if (!changed) return;
        say(more, plural(one.events.length, "event"));
        parts.replaceChildren(
          ...(one.events.length < 2 ? [] : one.events).map((part) =>
            el("p", {}, el("time", {}, clock(part.t)), ` ${byStableNames(part.sentence)}`)
          ),
        );
      },
    };
  }

  /** `found`: incidents, newest first. */
  show(found) {
    this.found = found;
    const wanted = this.filter.value.trim().toLowerCase();
    const text = (one) =>
      [one.kind, one.sentence, ...one.events.flatMap((part) => [part.event, part.sentence])].join(" ");
    this.rows.show(found.filter((one) => text(one).toLowerCase().includes(wanted)).slice(0, MOST), (one) => one.id);
  }
}
