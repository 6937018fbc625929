// The dialog that changes the policy of a job.

import { el } from "./dom.js";

const CHOICES = { on_divergence: ["heal", "drain", "report"] };
const TEXTS = {
  min_replicas: "groups that a quorum needs",
  max_replicas: "most groups in a quorum (0: no limit)",
  join_timeout: "wait for groups that have not asked, in seconds",
  heal_timeout: "wait for groups that heal, in seconds",
  heartbeat_timeout: "silence after which a group is lost, in seconds",
  reconnect_grace: "time to reconnect, in seconds",
  takeover_grace: "time to reconnect after a change of leader, in seconds (empty: heartbeat_timeout)",
  initial_replicas: "groups that the first quorum waits for",
  verify_every: "compare weights every so many steps (0: only when ordered)",
  on_divergence: "action for a group whose weights differ",
  drain_straggler_after: "drain a straggler after so many steps (0: never)",
  refuse_going_back: "refuse a start more than one step below the step that the job has reached",
  finish_grace: "wait of finished groups for a lost one, in seconds",
  job_ttl: "time after which an unused job is deleted, in seconds (0: never)",
};

/** Asks for changes of `policy`. Resolves with the changed fields, or with null. */
export function askPolicy(dialog, policy) {
  const inputs = Object.entries(policy).map(([name, value]) => [name, value, input(name, value)]);
  const fields = inputs.map(([name, , node]) => el("label", {}, el("code", {}, name), ` ${TEXTS[name] ?? ""}`, node));
  dialog.querySelector(".fields").replaceChildren(...fields);
  dialog.returnValue = "no";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      if (dialog.returnValue !== "yes") return resolve(null);
      const given = inputs.map(([name, value, node]) => [name, value, read(node, value)]);
      const changed = given.filter(([, before, after]) => after !== before);
      resolve(changed.length ? Object.fromEntries(changed.map(([name, , after]) => [name, after])) : null);
    }, { once: true });
  });
}

function input(name, value) {
  if (!CHOICES[name]) {
    const kind = typeof value === "string" ? "text" : typeof value === "boolean" ? "checkbox" : "number";
    return el("input", { name, type: kind, step: "any", min: 0, value: value ?? "", checked: value === true });
  }
  return el("select", { name }, ...CHOICES[name].map((one) => el("option", { selected: one === value }, one)));
}

function read(node, before) {
  if (node.type === "checkbox") return node.checked;
  if (node.type !== "number") return node.value;
  return node.value === "" ? (before == null ? null : before) : Number(node.value);
}
