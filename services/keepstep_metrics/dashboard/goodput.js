// The panel with the goodput and the time that was lost.

import { el, panel, Rows, say } from "./dom.js";
import { duration, percent, plural, STATES } from "./words.js";

export class Goodput {
  constructor() {
    this.good = el("p", { class: "big" });
    this.sentence = el("p");
    this.stack = el("div", { class: "stack", "aria-hidden": "true" });
    this.shares = new Rows(el("ul", { class: "shares" }), (state) => {
      const [share, time] = [el("b"), el("span", { class: "dim" })];
      const node = el("li", {}, el("span", { class: `state ${state}` }, state), share, time);
      return { node, update: (one) => (say(share, percent(one.share)), say(time, duration(one.seconds))) };
    });
    this.badput = el("p", { class: "dim" });
    this.counted = el("p", { class: "dim" });
    this.node = panel(
      "Goodput and lost time",
      this.good,
      this.sentence,
      this.stack,
      this.shares.parent,
      this.badput,
      this.counted,
    );
  }

  /** `found`: the answer of `goodput`. */
  show(found) {
    say(this.good, percent(found.goodput));
    const [, ...more] = found.sentence.split("; "); // the first part is the number above
    say(this.sentence, more.join("; "));
    const states = STATES.filter((state) => found.shares[state] > 0);
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
    const badput = Object.entries(found.badput).filter(([, seconds]) => seconds > 0);
    const types = badput.map(([type, seconds]) => `${type} ${duration(seconds)}`).join(", ");
    say(this.badput, types && `In the terms of ml-goodput-measurement: ${types}.`);
    const mean = (text, seconds) => (seconds == null ? "" : `; ${text} ${duration(seconds)}`);
    const commit = mean("mean time to recover", found.mean_time_to_recover);
    say(
      this.counted,
      `${found.steps_committed} group steps committed, ${found.steps_discarded} discarded; ${
        plural(found.failures, "failure")
      }${commit}${mean("mean time to return", found.mean_time_to_return)}.`,
    );
  }
}
